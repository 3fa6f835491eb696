"""A tokenizer of words for the tiny models: id 7 is "w7", and texts end with </s>."""

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

NAMES = ["<s>", "<pad>", "</s>", *(f"w{n}" for n in range(3, 32))]


def tokenizer(kind=PreTrainedTokenizerFast):
    """One of this class."""
    words = Tokenizer(models.WordLevel({name: i for i, name in enumerate(NAMES)}, unk_token="w3"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    return kind(tokenizer_object=words, eos_token="</s>", pad_token="<pad>", bos_token="<s>")


def text_of(ids):
    """The words of these ids."""
    return " ".join(NAMES[token] for token in ids)
