"""`generate(custom_generate=...)` of encoder-decoders against plain generate, token for token."""

import copy
from collections import Counter

import pytest
import torch
from scipy.stats import chisquare
from tiny_pairs import EOS, FAMILIES, VOCAB, batch, pair
from transformers.generation.utils import GenerateEncoderDecoderOutput

from outrider.integrations import encoder_inputs
from outrider.integrations.generate import SpeculativeGenerate, speculative

OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
WAYS = {
    "nothing": {},
    "min_length": {"min_length": 12},
    "encoder_ngrams": {"encoder_no_repeat_ngram_size": 2},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": EOS},
    "banned": {
        "bad_words_ids": [[5], [6, 7]],
        "suppress_tokens": [8, 9],
        "begin_suppress_tokens": [EOS, 10],
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
    },
}
DRAFTING = {
    "chain": lambda draft: {"draft_model": draft, "num_speculative_tokens": 3},
    "tree": lambda draft: {"draft_model": draft, "branching": (2, 2)},
    "reference": lambda draft: {"drafter": "reference_lookup"},
    "root": lambda draft: {"drafter": "none"},
}


def same(fast, plain):
    assert type(fast) is type(plain) is GenerateEncoderDecoderOutput
    assert torch.equal(fast.sequences, plain.sequences)
    assert len(fast.scores) == len(plain.scores) == len(fast.logits)
    for name in ("scores", "logits"):
        for mine, theirs in zip(getattr(fast, name), getattr(plain, name), strict=True):
            over = (mine == 0).all(1)  # plain generation goes on computing rows that have ended
            torch.testing.assert_close(mine[~over], theirs[~over], atol=1e-4, rtol=1e-5)


@pytest.mark.one_in(12)
@pytest.mark.parametrize("drafting", DRAFTING)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_batches_equal_plain_generate(family, drafting):
    target, draft = pair(family)
    call, accepted = SpeculativeGenerate(), 0
    for way in WAYS.values():
        how = {"max_new_tokens": 16, **way, **OUTPUTS, **batch()}
        plain = target.generate(**how)
        more = DRAFTING[drafting](draft)
        same(target.generate(custom_generate=call, **how, **more), plain)
        accepted += call.stats.accepted
    assert accepted > {"chain": 60, "tree": 60, "reference": 5, "root": -1}[drafting]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_prompts_of_the_decoder(family):
    target, draft = pair(family)
    start = target.config.decoder_start_token_id
    prompts = torch.tensor([[start, 20, 21], [start, 22, 23], [start, 24, 25]])
    how = {"max_new_tokens": 9, "decoder_input_ids": prompts, **OUTPUTS, **batch()}
    fast = target.generate(custom_generate=speculative, draft_model=draft, **how)
    same(fast, target.generate(**how))
    assert torch.equal(fast.sequences[:, :3], prompts)


def test_left_padded_prompts_of_the_decoder():
    target, draft = pair("t5")
    prompts = torch.tensor([[0, 0, 20, 21], [0, 22, 23, 24], [0, 0, 0, 25]])
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 1, 1]])
    how = {"max_new_tokens": 9, "decoder_input_ids": prompts, "decoder_attention_mask": mask}
    how |= {"repetition_penalty": 1.3, "min_new_tokens": 4, **OUTPUTS, **batch()}
    same(
        target.generate(custom_generate=speculative, draft_model=draft, **how),
        target.generate(**how),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_other_rows_are_noticed(family, monkeypatch):
    """The negative control: every row reads its neighbour's source."""
    target, draft = pair(family)
    how = {"max_new_tokens": 16, **batch()}
    plain = target.generate(**how)
    right = encoder_inputs._encoded
    monkeypatch.setattr(
        encoder_inputs, "_encoded", lambda *given: right(*given).take([1, 2, 0]), raising=True
    )
    wrong = target.generate(custom_generate=speculative, draft_model=draft, **how)
    assert not torch.equal(wrong, plain)


class Counting:
    """How often a model's encoder runs, and on how many rows."""

    def __init__(self, model):
        self.calls, self.rows = 0, 0
        encoder = model.get_encoder()
        self.handle = encoder.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module, given, keywords, output):
        self.calls += 1
        self.rows += len(output.last_hidden_state)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.handle.remove()


@pytest.mark.parametrize("drafting", ["chain", "reference"])
def test_the_encoder_runs_once(drafting):
    target, draft = pair("marian")
    how = {"custom_generate": speculative, "max_new_tokens": 16, **DRAFTING[drafting](draft)}
    target.generate(**batch(), **how)  # models are checked when they are first seen
    with Counting(target) as mine, Counting(draft) as other:
        target.generate(**batch(), **how)
    assert (mine.calls, mine.rows) == (1, 3)
    assert (other.calls, other.rows) == ((1, 3) if drafting == "chain" else (0, 0))


def test_several_sequences_of_one_source():
    """The largest alone is left to draw: every sequence is the greedy one of its own source."""
    target, draft = pair("bart")
    greedy = target.generate(**batch(), max_new_tokens=16)
    call = SpeculativeGenerate(draft_model=draft, num_speculative_tokens=3)
    how = {"do_sample": True, "top_k": 1, "num_return_sequences": 2, "max_new_tokens": 16}
    fast = target.generate(**batch(), custom_generate=call, **how, encoder_no_repeat_ngram_size=9)
    assert torch.equal(fast, greedy.repeat_interleave(2, 0))
    assert call.stats.accepted > 20


@torch.inference_mode()
def two_tokens(model, source, temperature):
    """The law of the first two tokens [V, V] behind the start, by the model's own forward."""
    start = model.config.decoder_start_token_id
    first = torch.stack([torch.full((VOCAB,), start), torch.arange(VOCAB)], 1)
    encoded = model.get_encoder()(**source)
    encoded.last_hidden_state = encoded.last_hidden_state.expand(VOCAB, -1, -1)
    logits = model(encoder_outputs=encoded, decoder_input_ids=first).logits / temperature
    laws = logits.double().softmax(-1)
    return laws[:1, 0].T * laws[:, 1]


@pytest.mark.parametrize("drafting", [{"num_speculative_tokens": 2}, {"branching": (2, 2)}])
def test_sampled_sequences_follow_the_law(drafting):
    target, draft = pair("t5")
    source = batch((6,))
    torch.manual_seed(1)
    made = target.generate(
        **source,
        custom_generate=speculative,
        draft_model=draft,
        do_sample=True,
        top_k=0,
        num_return_sequences=1500,
        max_new_tokens=2,
        eos_token_id=None,
        **drafting,
    )
    counts = Counter(map(tuple, made[:, 1:].tolist()))

    def likelihood(temperature):
        law = two_tokens(target, source, temperature)
        cells = [(divmod(at, VOCAB), p) for at, p in enumerate(law.flatten().tolist())]
        often = [(cell, p) for cell, p in cells if p * 1500 >= 8]
        seen = [counts[cell] for cell, _ in often]
        expected = [p * 1500 for _, p in often]
        rest = 1500 - sum(expected)
        return chisquare([*seen, 1500 - sum(seen)], [*expected, rest]).pvalue

    assert likelihood(1.0) > 0.001
    assert likelihood(1.2) < 1e-6  # another law is noticed


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_the_target_draft_on_its_states(family):
    target, _ = pair(family)
    plain = target.generate(**batch(), max_new_tokens=16)
    call = SpeculativeGenerate(draft_layers=(0,))
    how = {**batch(), "max_new_tokens": 16, "custom_generate": call}
    target.generate(**how)  # checked when it is first seen
    with Counting(target) as mine:
        fast = target.generate(**how)
    assert torch.equal(fast, plain)
    assert (mine.calls, call.stats.drafted > 10) == (1, True)


@pytest.mark.parametrize("share", ["auto", False])
def test_a_draft_with_the_same_encoder_reads_the_targets_states(share):
    target, near = pair("t5")
    draft = copy.deepcopy(near)
    draft.encoder.load_state_dict(target.encoder.state_dict())
    plain = target.generate(**batch(), max_new_tokens=16)
    how = {"draft_model": draft, "share_encoder": share, "custom_generate": speculative}
    target.generate(**batch(), max_new_tokens=16, **how)  # checked when it is first seen
    with Counting(draft) as other:
        fast = target.generate(**batch(), max_new_tokens=16, **how)
    assert torch.equal(fast, plain)
    assert other.calls == (0 if share == "auto" else 1)
