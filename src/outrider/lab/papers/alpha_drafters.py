"""Drafters of several sizes, each with a true law: n-gram tables, the draft model, cut models.

The n-gram tables are counted from the standard library's sources on this machine, without the
modules that the prompts come from. A cut model is the draft or the target with some of its layers:
nothing is trained, so its law is worse than a model's of that size, but it is a law.
"""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from outrider import ops
from outrider.certify.laws import Text, score
from outrider.drafters import DraftModel
from outrider.drafters.ngram_table import NgramTable, Table, count
from outrider.lab.papers import record
from outrider.laws.sampling import Sampling, rows, warp
from outrider.models import CausalModel, adapt
from outrider.models.sources import DTYPES
from outrider.text.speculator import Speculator
from outrider.types import Drafter, LanguageModel

ORDERS = {"unigram": 1, "bigram": 2, "3-gram": 3}
DRAFT = "draft model"


@dataclass(frozen=True)
class Source:
    """Something a chain can be drawn from: an n-gram table or a model."""

    of: Table | LanguageModel

    def drafter(self, gamma: int) -> Drafter:
        """A chain of `gamma` tokens."""
        if isinstance(self.of, Table):
            return NgramTable(self.of, gamma)
        return DraftModel(self.of, (1,) * gamma)

    def laws(self, texts: Sequence[Text], sampling: Sampling) -> Tensor:
        """[tokens, V]: the law at every emitted token, under `sampling`."""
        if isinstance(self.of, Table):
            return _table_laws(self.of, texts, sampling)
        return ops.probs(score(self.of, texts, sampling).laws).flatten(0, 1)


def sources(pair: Speculator, prompts: Sequence[dict[str, str]], library: int) -> dict[str, Source]:
    """All of them, cheapest first."""
    text = library_tokens(pair, prompts, library)
    vocab = pair.engine.target.vocab_size
    found = {name: Source(count(text, vocab, order)) for name, order in ORDERS.items()}
    layers = _layers(pair.notes.draft), _layers(pair.notes.target)
    if None not in layers:
        one = cut(pair, pair.notes.draft, [0])
        found["draft, first layer"] = Source(one)
    found[DRAFT] = Source(record.draft_of(pair))
    if None not in layers:
        deep = layers[1]
        assert deep is not None
        for name, keep in (
            (f"target, {deep // 4} first layers", range(deep // 4)),
            ("target, every other layer", range(0, deep, 2)),
        ):
            if len(keep) > 0:
                found[name] = Source(cut(pair, pair.notes.target, keep))
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
    return torch.tensor(found[:most])


def _layers(source: str) -> int | None:
    """How many layers a Llama checkpoint has; None where layers cannot be left out like that."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source)
    return int(config.num_hidden_layers) if config.model_type == "llama" else None


def cut(pair: Speculator, source: str, keep: Sequence[int]) -> CausalModel:
    """The Llama checkpoint with the layers `keep`, run as the pair's models are."""
    from transformers import AutoModelForCausalLM

    notes = pair.notes
    model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[notes.dtype])
    layers = [model.model.layers[i] for i in keep]
    for place, layer in enumerate(layers):
        layer.self_attn.layer_idx = place
    model.model.layers = nn.ModuleList(layers)
    model.config.num_hidden_layers = len(layers)
    driven = adapt(model.to(notes.device), packed=notes.packed, vocab_size=notes.vocab_size)
    driven.min_queries = min(driven.min_queries, 2)  # as `load` does for a draft
    return driven


def _table_laws(table: Table, texts: Sequence[Text], sampling: Sampling) -> Tensor:
    contexts = []
    back = max(table.order - 1, 1)
    for text in texts:
        whole = (-1,) * back + text.prompt + text.new
        start = back + len(text.prompt)
        contexts += [whole[start + i - back : start + i] for i in range(len(text.new))]
    logits = table.probs(torch.tensor(contexts)).log()[None]
    return ops.probs(warp(logits, rows([sampling])))[0]
