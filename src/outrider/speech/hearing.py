"""A Whisper model as transcription sees it: its words, its windows, what its encoder makes."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.nodes import causal
from outrider.models.prefill import ROUND, inference
from outrider.speech.vocabulary import Vocabulary
from outrider.types import Inputs, LanguageModel


@dataclass(frozen=True)
class Hearing:
    """What beside the engine is needed to turn sound into text.

    extractor        transformers' feature extractor of the target
    draft_extractor  of a draft model whose encoder reads other features, else None
    model            transformers' own model, for word times
    """

    name: str
    vocabulary: Vocabulary
    tokenizer: Any
    extractor: Any
    model: PreTrainedModel
    draft_extractor: Any = None

    @property
    def rate(self) -> int:
        """Samples per second."""
        return int(self.extractor.sampling_rate)

    @property
    def states(self) -> int:
        """Encoder states of a window."""
        return int(self.model.config.max_source_positions)

    @property
    def stride(self) -> int:
        """Frames of a state: its convolutions halve them."""
        return 2

    @property
    def frames(self) -> int:
        """Frames of a window."""
        return self.stride * self.states

    @property
    def context(self) -> int:
        """Positions of the decoder."""
        return int(self.model.config.max_target_positions)

    def seconds(self, frames: float) -> float:
        """Frames as seconds."""
        return round(frames * self.extractor.hop_length / self.rate, 3)

    def text(self, tokens: tuple[int, ...] | list[int]) -> str:
        """What tokens say, special ones and timestamps left out."""
        plain = [token for token in tokens if token < self.vocabulary.end_id]
        said: str = self.tokenizer.decode(
            plain, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return said

    def encode(self, text: str) -> list[int]:
        """A text's tokens, without special ones."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def one_row(features_FS: Tensor, device: torch.device) -> Inputs:
    """A window's frames [F, S] as the inputs of one row, frames in rows."""
    features = features_FS.T[None].contiguous().to(device)
    return Inputs(None, features, torch.ones(features.shape[:2], dtype=torch.bool, device=device))


@inference
def encode(target: LanguageModel, each: list[Inputs]) -> tuple[list[Inputs], float]:
    """The inputs of several rows with what the target's encoder makes of them, and the
    milliseconds that it took.

    On a CPU rows are read one by one, as nothing is gained otherwise, so that who is read beside a
    row does not change its rounding.
    """
    device = torch.device(target.device)
    started = time.perf_counter()
    if device.type == "cpu" or len(each) == 1:
        done = [target.encode(inputs) for inputs in each]
    else:
        whole = each[0]
        for row, inputs in enumerate(each[1:], 1):
            whole = whole.put([row], inputs)
        whole = target.encode(whole)
        done = [whole.take([row]) for row in range(len(each))]
        torch.cuda.synchronize(device)
    return done, 1e3 * (time.perf_counter() - started)


@inference
def language(target: LanguageModel, vocabulary: Vocabulary, inputs: Inputs) -> str:
    """The most probable language of a row that is encoded: what the model says first.

    One call of the decoder; the encoder does not run.
    """
    device = torch.device(target.device)
    cache = target.open(1, ROUND, inputs)
    start = torch.full((1, 1), vocabulary.start_id, device=device)
    nodes = causal(start, torch.zeros_like(start), ROUND)
    logits_V = target.forward(cache, nodes, last=1).logits_BQV[0, -1]
    codes = list(vocabulary.languages)
    ids = torch.tensor([vocabulary.languages[code] for code in codes], device=device)
    return codes[int(logits_V[ids].argmax())]
