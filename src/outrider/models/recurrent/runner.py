"""Runs models some of whose layers keep a state: their own forward, with handles for states."""

from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import UnsupportedModel
from outrider.models.hf import FULL, Mask, TransformersRunner
from outrider.models.recurrent import LAYERS
from outrider.models.recurrent.hooks import install


class RecurrentRunner(TransformersRunner):
    """`ForCausalLM.forward` over trees, for mixers that call functions behind our wrappers."""

    recurrent = True

    def __init__(self, model: PreTrainedModel) -> None:
        if not install(model):
            raise UnsupportedModel(
                f"the mixers of {type(model).__name__} call none of the functions that outrider "
                "can stand before; got a modelling file of another version of transformers; "
                "install transformers 5.23 or later"
            )
        super().__init__(model)

    def masks(self, visible_BQW: Tensor, positions_BQ: Tensor, keys_BW: Tensor | None) -> Mask:
        """Masks of the attention layers, and None for those that keep a state."""
        made = super().masks(visible_BQW, positions_BQ, keys_BW)
        if isinstance(made, Tensor):
            return made
        return {kind: None if kind in LAYERS else mask for kind, mask in made.items()}

    def _cuts(self) -> bool:
        kinds = set(self._kinds or ()) - LAYERS
        return bool(kinds - {FULL}) if self._kinds is not None else super()._cuts()
