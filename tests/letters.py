"""A tokenizer of letters and pairs of letters, and draft models whose vocabulary is another."""

from outrider.models.cross_tokenizer_model import TranslatedModel
from outrider.models.token_bytes import TokenBytes
from outrider.models.token_remap import VocabularyMap

LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")


class Letters:
    """The longest token first; unknown letters are left out. Nothing special, no spaces."""

    def __init__(self, tokens):
        self.tokens = tuple(tokens)
        self.ids = {token: number for number, token in enumerate(self.tokens)}
        self.longest = max(map(len, self.tokens))

    def __call__(self, text):
        found = []
        while text:
            sizes = [n for n in range(self.longest, 0, -1) if text[:n] in self.ids]
            found += [self.ids[text[:n]] for n in sizes[:1]]
            text = text[sizes[0] if sizes else 1 :]
        return {"input_ids": found}

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return "".join(self.tokens[number] for number in token_ids)

    def get_vocab(self):
        return dict(self.ids)


#: Of 32 tokens 29 are common; the draft's other pairs are others.
TARGET = (*LETTERS, "ab", "cd", "ef", "gh", "ij", "kl")
DRAFT = (*LETTERS, "ab", "cd", "ef", "mn", "op", "bc")


def translated(model, target=TARGET, draft=DRAFT):
    """The model as a draft over the target's tokens, its own ids standing for the draft's."""
    words = VocabularyMap(TokenBytes(Letters(target)), TokenBytes(Letters(draft)))
    return TranslatedModel(model, words, len(target))
