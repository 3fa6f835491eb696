"""Pairs of transformers' models for the protocol of Wagner et al.: what they read, how texts count.

A pair is decoder-only or text to text (prompts and references from a file), or Whisper on
recordings (`wagner_speech`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.lab.papers.score import ROUGE_1, Score
from outrider.lab.prompts import read_rows
from outrider.lab.recordings import Spoken
from outrider.load import shipped
from outrider.models.config import read
from outrider.models.sources import Source, first_line, read_tokenizer


@dataclass(frozen=True)
class Prompt:
    """What `generate` is given for one text.

    length     tokens of its result that are not new
    reference  what the text is compared with; "" if there is none
    """

    arguments: dict[str, Any]
    length: int
    reference: str = ""


@dataclass(frozen=True)
class Pair:
    """Two models that share a tokenizer, and what they are tried on.

    longest     tokens that a whole text may need; None: as many as the protocol says
    bound       the sigmoid's -alpha and beta, if nothing else is asked
    recordings  what the prompts were made of, for speech
    """

    name: str
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[Prompt]
    decode: Callable[[list[int]], str]
    score: Score = ROUGE_1
    longest: int | None = None
    bound: float = 1e4
    recordings: tuple[Spoken, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the target runs."""
        return torch.device(self.target.device)


def tiny_pair(vocab: int, device: str = "cpu") -> Pair:
    """A pair with random weights and a large vocabulary: agreement is constructed, not trained."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
        initializer_range=0.3, bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    target = LlamaForCausalLM(config).eval().to(device)
    draft = LlamaForCausalLM(config).eval().to(device)
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    prompts = [continued(list(range(5 * i + 1, 5 * i + 6)), "", device) for i in range(4)]
    name = f"random weights, V={vocab}, constructed agreement"
    return Pair(name, target, draft, prompts, lambda ids: "")


def load_pair(
    target: str,
    draft: str,
    rows: Sequence[dict[str, str]],
    device: str,
    dtype: str = "float32",
) -> Pair:
    """Two models of transformers with one tokenizer; rows have `prompt` and `reference`.

    To an encoder-decoder a prompt is the text that it reads: a summary's article.
    """
    sources = Source(target, "target"), Source(draft, "draft")  # both, before weights are read
    tokenizer = read_tokenizer(target)
    big, small = (weights(source, device, dtype) for source in sources)
    for model in (big, small):
        model.generation_config.pad_token_id = 0
    reads = read(big.config, "is_encoder_decoder", bool)
    start = [] if reads or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    prompts = []
    for row in rows:
        ids = start + tokenizer.encode(row["prompt"].rstrip(), add_special_tokens=bool(reads))
        prompt = continued(ids, row.get("reference", ""), device)
        prompts.append(replace(prompt, length=1) if reads else prompt)  # 1: the decoder's start
    return Pair(
        f"{target} with {draft}", big, small, prompts,
        lambda found: str(tokenizer.decode(found, skip_special_tokens=True)),
    )  # fmt: skip


def continued(ids: list[int], reference: str, device: str) -> Prompt:
    """Token ids that a decoder goes on from."""
    row = torch.tensor([ids], device=device)
    return Prompt({"input_ids": row, "attention_mask": torch.ones_like(row)}, len(ids), reference)


def weights(source: Source, device: str, dtype: str) -> PreTrainedModel:
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
) -> Pair:
    """The packaged Python-code pair on its held-out prompts, or on others."""
    rows = read_rows()[:count] if prompts is None else prompts
    pair = load_pair(str(shipped("target")), str(shipped("draft")), rows, device, dtype)
    return replace(pair, name="shipped pair")
