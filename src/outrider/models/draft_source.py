"""What may draft beside a target, and all that loading asks of it.

Another model has its own weights and words (`ModelSource`). Layers of the target and heads on its
states are made for one target and borrow from it (`TargetBoundSource`).
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, TypeAlias

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from outrider.errors import NumericalError, UnsupportedModel
from outrider.models import placement
from outrider.models.calibrate import Setting
from outrider.models.sources import ModelSource, ShareEncoder
from outrider.types import LanguageModel


class TargetBoundSource(ABC):
    """A `DraftSource` of one target's: where that is, with its tokens and what its encoder made.

    A new kind says what it reads, and makes a model of it. See docs/adding-a-head.md.
    """

    role: ClassVar[str] = "draft"  #: what messages call it
    takes_int8: ClassVar[bool] = False  #: whether its weights can be kept in 8 bits
    #: whether it is a whole model, whose tokens may be others than the target's
    stands_alone: ClassVar[bool] = False
    config: PretrainedConfig
    draft_dtype: str | None = None  #: what it is best kept in; None: in the target's dtype
    stored_types: ClassVar[str] = ""  #: as of a `ModelSource`

    def __init__(self, target: ModelSource, given: Any) -> None:
        self.target, self.given = target, given
        if placement.offloaded(target.given):
            raise UnsupportedModel(
                "heads and drafts made of the target's layers are lent its weights, of which some "
                f"are fetched for each call; got {target} with device_map; use a draft model of "
                "its own, or a drafter without a model"
            )

    @classmethod
    @abstractmethod
    def reads(cls, given: object) -> bool:
        """Whether a user's draft is of this kind: by its config.json, never by its weights."""

    @abstractmethod
    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> LanguageModel:
        """The draft as a model of `vocab` tokens. Raises ConfigurationError for wrong weights."""

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

    def not_numbers(
        self, error: NumericalError, dtype: str, device: torch.device
    ) -> NumericalError:
        """As it was said: its weights are checked where they are read."""
        return error

    def __str__(self) -> str:
        return str(self.given)


#: Where a draft model comes from: its configuration first, weights when they are needed.
DraftSource: TypeAlias = ModelSource | TargetBoundSource
