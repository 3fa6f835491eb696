"""Drafters of several sizes: n-gram tables, the draft model, cut models; and copies of the source.

The n-gram tables are counted from the standard library's sources on this machine, without the
modules that the prompts come from. A cut model is the draft or the target with some of its layers
(of an encoder-decoder: of its decoder's): nothing is trained, so its law is worse than a model's of
that size, but it is a law.
"""

import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider import DraftModel, SamplingParams, Speculator, ops
from outrider.drafters import ReferenceLookup
from outrider.drafters.ngram_table import NgramTable, Table, count
from outrider.drafters.tree_drafting import inputs_for
from outrider.models import TreeDecoder, adapt, pretrained
from outrider.models.layer_subset import is_folder
from outrider.models.weight_only import states_dtype
from outrider.sampling.sampling_params import rows
from outrider.types import Drafter, LanguageModel
from outrider_lab.certify.laws import CertifiedText, score
from outrider_lab.papers.alpha_tasks import Rows, reads_sources
from outrider_lab.tasks.arms import second_tenth

ORDERS = {"unigram": 1, "bigram": 2, "3-gram": 3}
DRAFT = "draft model"


@dataclass(frozen=True)
class AlphaSource:
    """Something a chain can be drawn from: an n-gram table or a model."""

    of: Table | LanguageModel

    def drafter(self, gamma: int) -> Drafter:
        """A chain of `gamma` tokens."""
        if isinstance(self.of, Table):
            return NgramTable(self.of, gamma)
        return DraftModel(self.of, (1,) * gamma)

    def laws(self, texts: Sequence[CertifiedText], sampling: SamplingParams) -> Tensor:
        """[tokens, V]: the law at every emitted token, under `sampling`."""
        if isinstance(self.of, Table):
            return _table_laws(self.of, texts, sampling)
        read = [replace(text, inputs=inputs_for(self.of, text.inputs)) for text in texts]
        scored = score(self.of, read, sampling)
        return ops.probs(scored.laws)[scored.valid_BT]


class AlphaCopies:
    """Chains that are copied from the source: they have no law."""

    def drafter(self, gamma: int) -> Drafter:
        """A chain of `gamma` tokens."""
        return ReferenceLookup(gamma)


Sources: TypeAlias = Mapping[str, AlphaSource | AlphaCopies]


def sources(pair: Speculator, prompts: Rows, library: int) -> dict[str, AlphaSource | AlphaCopies]:
    """All of them, cheapest first."""
    text = library_tokens(pair, prompts, library)
    vocab = pair.engine.target.vocab_size
    found: dict[str, AlphaSource | AlphaCopies] = {
        name: AlphaSource(count(text, vocab, order)) for name, order in ORDERS.items()
    }
    if reads_sources(pair) and pair.hearing is None:  # sound has no tokens to be copied
        found["reference lookup"] = AlphaCopies()
    drafter = pair.engine.drafter
    draft = drafter.model if isinstance(drafter, DraftModel) else None
    layers = (None if draft is None else _layers(pair.notes.draft)), _layers(pair.notes.target)
    if layers[0] is not None:
        found["draft, first layer"] = AlphaSource(cut(pair, pair.notes.draft, [0]))
    if draft is not None:
        found[DRAFT] = AlphaSource(draft)
    if layers[1] is not None:
        deep = layers[1]
        left_out = second_tenth(deep)
        for name, keep in (
            (f"target, {deep // 4} first layers", [*range(deep // 4)]),
            ("target, every other layer", [*range(0, deep, 2)]),
            (
                f"target without layers {', '.join(map(str, left_out))}",
                [layer for layer in range(deep) if layer not in left_out],
            ),
        ):
            if 0 < len(keep) < deep:
                found[name] = AlphaSource(cut(pair, pair.notes.target, keep))
    return found


def library_tokens(pair: Speculator, prompts: Sequence[dict[str, str]], most: int) -> Tensor:
    """Tokens of the standard library, without the prompts' modules and without tests."""
    held_out = {row.get("id", "").split(":")[0] for row in prompts}
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[int] = []
    for path in sorted(root.glob("**/*.py")):
        parts = path.relative_to(root).parts
        if {"test", "tests", "site-packages", "idlelib"} & set(parts) or path.name in held_out:
            continue
        try:
            found += pair.tokenizer.encode(path.read_text(encoding="utf-8"), verbose=False)
        except (OSError, UnicodeDecodeError):
            continue
        if len(found) >= most:
            break
    return torch.tensor(found[:most], device="cpu")


def _layers(source: str) -> int | None:
    """How many layers a checkpoint's decoder has; None where they cannot be left out like that."""
    if is_folder(source):  # a draft of outrider's own
        return None
    config = pretrained.read_config(source, trust=False)
    if config.model_type == "llama":
        return int(config.num_hidden_layers)
    return int(config.num_decoder_layers) if config.model_type in ("t5", "mt5") else None


def cut(pair: Speculator, source: str, keep: Sequence[int]) -> TreeDecoder:
    """The Llama or T5 checkpoint with the decoder layers `keep`, run as the pair's models are."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    notes = pair.notes
    kind = AutoModelForSeq2SeqLM if reads_sources(pair) else AutoModelForCausalLM
    dtype = states_dtype(notes.dtype, torch.device(notes.device))
    model = pretrained.read_model(kind, source, trust=False, dtype=dtype)
    (_cut_t5 if model.config.is_encoder_decoder else _cut_llama)(model, keep)
    return adapt(model.to(notes.device), packed=notes.packed, vocab_size=notes.vocab_size)


def _cut_llama(model: PreTrainedModel, keep: Sequence[int]) -> None:
    layers = [model.model.layers[i] for i in keep]
    for place, layer in enumerate(layers):
        layer.self_attn.layer_idx = place
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)


def _cut_t5(model: PreTrainedModel, keep: Sequence[int]) -> None:
    """The first layer is always kept: it holds the positions of all."""
    blocks = [model.decoder.block[i] for i in keep]
    for place, block in enumerate(blocks):
        block.layer[0].SelfAttention.layer_idx = place
        block.layer[1].EncDecAttention.layer_idx = place
    model.decoder.block = nn.ModuleList(blocks)
    model.config.num_decoder_layers = model.decoder.config.num_layers = len(blocks)


def _table_laws(table: Table, texts: Sequence[CertifiedText], sampling: SamplingParams) -> Tensor:
    contexts = []
    back = max(table.order - 1, 1)
    for text in texts:
        whole = (-1,) * back + text.prompt + text.new
        start = back + len(text.prompt)
        contexts += [whole[start + i - back : start + i] for i in range(len(text.new))]
    logits = table.probs(torch.tensor(contexts, device="cpu")).log()[None]
    return ops.probs(ops.warp(logits, rows([sampling])))[0]
