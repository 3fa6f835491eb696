"""Pairs of transformers' models for the protocol of Wagner et al.: what they read, how texts count.

A pair is decoder-only or text to text (prompts and references from a file), or Whisper on
recordings (`wagner_speech`).
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import ConfigurationError, first_line
from outrider.models import layer_subset
from outrider.models.config import read
from outrider.models.pretrained import resolve_tokenizer
from outrider.models.sources import ModelSource
from outrider.shipped import shipped
from outrider_lab.bench.prompts import read_rows
from outrider_lab.papers.score import ROUGE_1, Score
from outrider_lab.recordings import SpokenText
from outrider_lab.tasks.prompts import tasks, token_ids


@dataclass(frozen=True)
class WagnerPrompt:
    """What `generate` is given for one text.

    length     tokens of its result that are not new
    reference  what the text is compared with; "" if there is none
    """

    arguments: dict[str, Any]
    length: int
    reference: str = ""


@dataclass(frozen=True)
class WagnerPair:
    """Two models that share a tokenizer, and what they are tried on.

    longest     tokens that a whole text may need; None: as many as the protocol says
    bound       the sigmoid's -alpha and beta, if nothing else is asked
    recordings  what the prompts were made of, for speech
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[WagnerPrompt]
    decode: Callable[[list[int]], str]
    score: Score = ROUGE_1
    longest: int | None = None
    bound: float = 1e4
    recordings: tuple[SpokenText, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return torch.device(self.target.device)


def tiny_pair(vocab: int, device: str = "cpu") -> WagnerPair:
    """A pair with random weights and a large vocabulary: agreement is constructed, not trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cpu"):  # whatever the caller's default is
        target, draft = (LlamaForCausalLM(config).eval().to(device) for _ in range(2))
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    prompts = [continued(list(range(5 * i + 1, 5 * i + 6)), "", device) for i in range(4)]
    name = f"random weights, V={vocab}, constructed agreement"
    return WagnerPair(name, target, draft, prompts, lambda ids: "")


def load_pair(
    target: str,
    draft: str | None,
    rows: Sequence[dict[str, str]] | None,
    device: str,
    dtype: str = "float32",
    skip: Collection[int] = (),
) -> WagnerPair:
    """Two models of transformers with one tokenizer; rows have `prompt` and `reference`.

    To an encoder-decoder a prompt is the text that it reads: a summary's article. None are the
    shipped texts to be summarised, asked for in the target's chat template. Without a draft it is
    the target without the layers of `skip`, on a cache of its own.
    """
    sources = [ModelSource(target, "target")]  # all of them, before weights are read
    sources += [ModelSource(draft, "draft")] if draft is not None else []
    tokenizer = resolve_tokenizer(target)
    big, *others = (weights(source, device, dtype) for source in sources)
    small = others[0] if others else without_layers(big, skip)
    for model in (big, small):
        model.generation_config.pad_token_id = 0
    name = (
        draft or f"itself without {len(set(skip))} of its {layer_subset.depth(big.config)} layers"
    )
    reads = bool(read(big.config, "is_encoder_decoder", bool))
    if rows is None and reads:
        raise ConfigurationError(
            f"an encoder-decoder needs texts to read; got {target!r} without --prompts; give a file"
        )
    prompts = []
    for ids, reference in _asked(tokenizer) if rows is None else _given(rows, tokenizer, reads):
        prompt = continued(ids, reference, device)
        prompts.append(replace(prompt, length=1) if reads else prompt)  # 1: the decoder's start
    return WagnerPair(
        f"{target} with {name}", big, small, prompts,
        lambda found: str(tokenizer.decode(found, skip_special_tokens=True)),
    )  # fmt: skip


def _given(
    rows: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerBase, reads: bool
) -> Iterator[tuple[list[int], str]]:
    start = [] if reads or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    for row in rows:
        ids = tokenizer.encode(row["prompt"].rstrip(), add_special_tokens=reads)
        yield start + ids, row.get("reference", "")


def _asked(tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[list[int], str]]:
    for task in tasks():
        if task.kind == "summary":
            yield token_ids(tokenizer, task.turns), task.reference


def without_layers(model: PreTrainedModel, skip: Collection[int]) -> PreTrainedModel:
    """A model without some of its decoder layers; the weights are the model's own.

    Raises ConfigurationError for layers that it does not have, and for all or none of them.
    """
    count = layer_subset.depth(model.config)
    kept = [layer for layer in range(count) if layer not in set(skip)]
    if not skip or not kept or not set(skip) <= set(range(count)):
        raise ConfigurationError(
            f"a draft of the target's own layers leaves some of its {count} out; got --skip "
            f"{','.join(map(str, sorted(skip))) or 'without a layer'}; give numbers from 0 to "
            f"{count - 1}, or --draft-model"
        )
    return layer_subset.cut(model, kept).eval()


def continued(ids: list[int], reference: str, device: str) -> WagnerPrompt:
    """Token ids that a decoder goes on from."""
    row = torch.tensor([ids], device=device)
    return WagnerPrompt(
        {"input_ids": row, "attention_mask": torch.ones_like(row)}, len(ids), reference
    )


def weights(source: ModelSource, device: str, dtype: str) -> PreTrainedModel:
    """The model itself, or a ConfigurationError that says why not."""
    try:
        return source.model(dtype, torch.device(device)).eval()
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot load the {source.role} model's weights; got {str(source)!r} "
            f"({first_line(error)}); check the path or download the model first"
        ) from error


def shipped_pair(
    count: int,
    device: str = "cpu",
    prompts: Sequence[dict[str, str]] | None = None,
    dtype: str = "float32",
) -> WagnerPair:
    """The packaged Python-code pair on its held-out prompts, or on others."""
    rows = read_rows()[:count] if prompts is None else prompts
    pair = load_pair(str(shipped("target")), str(shipped("draft")), rows, device, dtype)
    return replace(pair, name="shipped pair")
