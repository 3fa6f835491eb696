"""transformers' own decoding as arms of a comparison: stock weights, its own loop, its defaults.

The target's forward calls are counted by a hook, so that tokens per call can be compared.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import GenerationConfig

from outrider.models import pretrained
from outrider.sampling.sampling_params import SamplingParams
from outrider.stats import Stats


@dataclass(frozen=True)
class TimedCompletion:
    """Tokens of one call, its whole time, and how often the target yielded tokens in it."""

    token_ids: list[int]
    seconds: float
    calls: int  #: of the target; ours reads the prompt in one before these
    stats: Stats | None = None  #: transformers keeps none


class Stock:
    """A target and a draft model as transformers loads them."""

    def __init__(
        self,
        target: str | Path,
        draft: str | Path | None,
        dtype: torch.dtype,
        device: torch.device | str,
        trust: bool = False,
    ) -> None:
        read = partial(pretrained.read_model, AutoModelForCausalLM, trust=trust, dtype=dtype)
        self.target = read(where=str(target)).to(device)
        self.draft = None
        if draft is not None:
            self.draft = read(where=str(draft)).to(device)
        self.calls = 0
        self.target.register_forward_hook(self._count)
        defaults = GenerationConfig._get_default_generation_params()
        self.defaults = {
            name: defaults[name]
            for name in (
                "num_assistant_tokens",
                "num_assistant_tokens_schedule",
                "assistant_confidence_threshold",
            )
        }

    def _count(self, *_: object) -> None:
        self.calls += 1

    def run(
        self, prompt: Sequence[int], how: SamplingParams, most: int, **more: object
    ) -> TimedCompletion:
        """One call of `generate`, from prompt to last token."""
        ids = torch.tensor([list(prompt)], device=self.target.device)
        law: dict[str, object] = {"do_sample": False}
        if how.temperature > 0:
            torch.manual_seed((how.seed or 0) & 0x7FFFFFFF)
            law = {
                "do_sample": True,
                "temperature": how.temperature,
                "top_k": how.top_k,
                "top_p": how.top_p,
                "min_p": how.min_p or None,
            }
        before, started = self.calls, time.perf_counter()
        out = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=most,
            pad_token_id=self.target.generation_config.pad_token_id or 0,
            **law,
            **more,
        )
        if self.target.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        return TimedCompletion(out[0, len(prompt) :].tolist(), seconds, self.calls - before)

    def assisted(
        self, prompt: Sequence[int], how: SamplingParams, most: int, count: int | None
    ) -> TimedCompletion:
        """Assisted generation with transformers' defaults, or a fixed number of drafted tokens."""
        if self.draft is None:
            return self.run(prompt, how, most, prompt_lookup_num_tokens=count or 10)
        settings = self.defaults
        if count is not None:
            settings = {
                "num_assistant_tokens": count,
                "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0,
            }
        for name, value in settings.items():
            setattr(self.draft.generation_config, name, value)
        with _own_calls_unreported():
            return self.run(prompt, how, most, assistant_model=self.draft)


@contextmanager
def _own_calls_unreported() -> Iterator[None]:
    """transformers 5.23's assisted loop calls the draft's `generate` in a way that transformers has
    deprecated, and says so: nothing that a reader of a comparison could change."""

    def keep(record: logging.LogRecord) -> bool:
        return "Passing `generation_config` together with" not in record.getMessage()

    logger = logging.getLogger("transformers.generation.utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)
