"""Tiny Llama models from configurations: no file, no network, the same weights every time."""

from collections.abc import Callable
from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.models import LlamaRunner, TransformersRunner, TreeDecoder
from outrider.models.decoder import ModelRunner

VOCAB = HIDDEN = 32
PROMPTS = ([3, 1, 4, 1, 5, 9], [2, 7], [8, 2, 8, 1, 8, 2, 8, 1, 8], [6], [1, 2, 3, 1, 2, 3, 1, 2])

#: How a tiny model is run: by the lean runner, or through transformers' own forward.
RUNNERS: dict[str, Callable[[LlamaForCausalLM], ModelRunner]] = {
    "lean": lambda model: LlamaRunner(model, False),
    "transformers": TransformersRunner,
}


#: Fields of the tiny models' LlamaConfig.
TINY: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


def llama(seed: int = 0, **settings: object) -> LlamaForCausalLM:
    """A random model of two layers whose laws are peaked enough to disagree about.

    `settings` are fields of its LlamaConfig, in place of the tiny ones.

    >>> llama().config.vocab_size
    32
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**(TINY | settings))).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases are not left at 1 and 0
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def perturbed(model: LlamaForCausalLM, size: float, seed: int = 1) -> LlamaForCausalLM:
    """A copy with noise on every weight: a draft model that often, not always, agrees.

    `size` is the noise's deviation in deviations of the weights.

    >>> perturbed(llama(), 0.12).config.vocab_size
    32
    """
    torch.manual_seed(seed)
    copy = LlamaForCausalLM(model.config).eval()
    copy.load_state_dict(model.state_dict())
    disturb(copy, size)
    return copy


def disturb(model: PreTrainedModel, size: float) -> None:
    """Add noise from torch's generator to every weight, in deviations of the weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(size * parameter.std() * torch.randn_like(parameter))


@lru_cache
def pair(
    size: float = 0.12, vocab: int = VOCAB, runner: str = "lean", context: int = 256
) -> tuple[TreeDecoder, TreeDecoder]:
    """A target and a draft model that agrees more or less, by the size of its noise.

    `runner` is a key of RUNNERS. The same call gives the same objects.

    >>> target, draft = pair()
    >>> target.vocab_size, draft.vocab_size
    (32, 32)
    """
    target = llama(vocab_size=vocab, max_position_embeddings=context)
    run = RUNNERS[runner]
    return TreeDecoder(run(target)), TreeDecoder(run(perturbed(target, size)))
