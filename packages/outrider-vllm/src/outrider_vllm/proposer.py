"""Drafters that need no model, inside vLLM: a proposer for its `custom_class`.

    LLM(model, speculative_config={
            "method": "custom_class", "model": "outrider_vllm.Proposer",
            "num_speculative_tokens": 8},
        additional_config={"outrider": {"drafter": "suffix"}})

vLLM hands over the texts of its rows and takes lists of tokens. It knows nothing of the law that
these were drawn from and verifies them as placed, so only drafts that are functions of the row's
own text are proposed. Nothing of vLLM is imported here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from outrider import drafters
from outrider.drafters import DrafterParts, DraftOptions, deterministic_tree, ngram_table
from outrider.errors import ConfigurationError
from outrider.sampling.sampling_params import SamplingParams, rows
from outrider.types import Context, Draft, Drafter, DrawKind, Laws, Scores, Verdict

#: Drafters whose proposals follow from the text alone.
DRAFTERS = ("suffix", "prompt_lookup", "ngram_table")

Array = npt.NDArray[np.integer[Any]]


class VllmSpeculativeConfig(Protocol):
    """What is read of vLLM's `SpeculativeConfig`."""

    num_speculative_tokens: int


class VllmModel(Protocol):
    """What is read of vLLM's `ModelConfig`."""

    max_model_len: int

    def get_vocab_size(self) -> int:
        """The model's outputs."""


class VllmConfig(Protocol):
    """What is read of vLLM's `VllmConfig`."""

    speculative_config: VllmSpeculativeConfig
    model_config: VllmModel
    additional_config: Mapping[str, Any]


@dataclass(frozen=True)
class _ProposerRow:
    """A text as it was when it was last seen, and what the drafter keeps of it."""

    text: Array
    memory: Any

    def begins(self, text: Array) -> bool:
        """Whether a text goes on with this one."""
        size = len(self.text)
        return size <= len(text) and bool((self.text == text[:size]).all())


class Proposer:
    """Proposes for vLLM's rows, with one of `DRAFTERS`.

    Of `additional_config["outrider"]` it takes `drafter` ("suffix" if there is none), and of what
    that drafter takes `ngram` (shortest and longest, of prompt_lookup) and `table` (a file, of
    ngram_table). Drafts of a table are its most probable tokens.

    Raises ConfigurationError for anything else.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        asked = dict((vllm_config.additional_config or {}).get("outrider", {}))
        name, table = asked.pop("drafter", DRAFTERS[0]), asked.pop("table", None)
        if name not in DRAFTERS:
            known = ", ".join(DRAFTERS)
            raise ConfigurationError(
                f"vLLM takes drafts that follow from the text alone; got drafter {name!r}; "
                f"use one of {known}"
            )
        if strange := asked.keys() - {"ngram"}:
            raise ConfigurationError(
                f"additional_config of outrider knows drafter, ngram and table; got "
                f"{min(strange)!r}; leave it out"
            )
        count = vllm_config.speculative_config.num_speculative_tokens
        parts = DrafterParts(
            table=ngram_table.opened(table), vocab_size=vllm_config.model_config.get_vocab_size()
        )
        self.drafter: Drafter = drafters.make(name, parts, DraftOptions(count, **asked))
        self._longest = vllm_config.model_config.max_model_len
        self._rows: list[_ProposerRow | None] = []

    def load_model(self, *models: object, **options: object) -> None:
        """No model is needed."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Array,
        token_ids_cpu: Array,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Drafted tokens of every row.

        sampled_token_ids   new tokens of each row, none of one whose prompt is still being read
        num_tokens_no_spec  tokens of each row's text, the new ones included
        token_ids_cpu       the texts [rows, longest]
        """
        found: list[_ProposerRow | None] = []
        drafts: list[list[int]] = []
        free = list(self._rows)
        for at, sampled in enumerate(sampled_token_ids):
            size = int(num_tokens_no_spec[at])
            room = self._longest - size - 1
            if not sampled or room < 1:
                found.append(None)
                drafts.append([])
                continue
            text = token_ids_cpu[at, :size].copy()
            row = _ProposerRow(text, self._read(text, _claimed(free, at, text)))
            found.append(row)
            drafts.append(self._drafted(row)[:room])
        self._rows = found
        return drafts

    def _read(self, text: Array, before: _ProposerRow | None) -> Any:
        """What the drafter keeps of a text, of which it may have read a part."""
        if before is None:
            return self.drafter.open(_context(text), self._longest)
        new = text[len(before.text) :].tolist()
        if new:
            drafted = deterministic_tree.chains([[int(before.text[-1]), *new[:-1]]], DrawKind.FIXED)
            self.drafter.commit(before.memory, _context(before.text), drafted, *_kept(new))
        return before.memory

    def _drafted(self, row: _ProposerRow) -> list[int]:
        drafter = self.drafter
        draft: Draft = drafter.propose(row.memory, _context(row.text), drafter.shapes[0])
        there = int((draft.draws_BNK[0] >= 0).sum())
        tokens: list[int] = draft.tokens_BN[0, 1 : 1 + there].tolist()
        return tokens


def _claimed(free: list[_ProposerRow | None], at: int, text: Array) -> _ProposerRow | None:
    """The row that this text goes on with, taken out; rows may have moved, come and gone."""
    for place in sorted(range(len(free)), key=lambda place: place != at):
        row: _ProposerRow | None = free[place]
        if row is not None and row.begins(text):
            free[place] = None
            return row
    return None


def _context(text: Array) -> Context:
    """One row, greedy: what is drafted follows from the text."""
    tokens_1L = torch.from_numpy(text.astype(np.int64))[None]
    length_1 = torch.tensor([len(text)], device="cpu")
    return Context(tokens_1L, length_1, len(text), rows([SamplingParams(0, seed=0)]))


def _kept(new: Sequence[int]) -> tuple[Verdict, Scores]:
    """A verdict that adds these tokens; nothing is known of the target's laws."""
    count = len(new) - 1
    path_1D = torch.arange(1, count + 1, device="cpu")[None]
    verdict = Verdict(
        path_1D, torch.tensor([count], device="cpu"), torch.tensor([new[-1]], device="cpu")
    )
    return verdict, Scores(Laws(torch.zeros(1, 0, 0, device="cpu"), torch.zeros(1, device="cpu")))
