"""What all drafts have in common that are made for one target and borrow from it."""

from typing import Protocol

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from outrider.models.calibrate import Setting
from outrider.models.sources import ModelSource, ShareEncoder
from outrider.types import LanguageModel


class TargetBoundSource(Protocol):
    """A draft of one target's: where that is, with its tokens and what its encoder made."""

    role: str = "draft"
    config: PretrainedConfig

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> LanguageModel:
        """The draft as a model."""

    def shares(
        self, target: ModelSource, wish: ShareEncoder, dtype: str, place: torch.device
    ) -> bool:
        """Nothing of an encoder: the target's states have read it."""
        return False

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """None: its tokens are the target's."""
        return None

    def loaded_device(self) -> torch.device | None:
        """None: it is where the target is."""
        return None
