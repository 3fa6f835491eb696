"""Decoders without an encoder that attend to the target's states: `WhisperForCausalLM` and kin."""

import inspect

from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.seq2seq.runner import Seq2SeqRunner


class StatesRunner(Seq2SeqRunner):
    """Runs the decoder through `ForCausalLM.forward`, with states that another model made."""

    prefix = ""

    def __init__(self, model: PreTrainedModel, shares: bool = True) -> None:
        super().__init__(model, shares=True)

    def _takes_positions(self) -> bool:
        return "position_ids" in inspect.signature(self._decoder.forward).parameters

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """States by the name that the family has for them."""
        name = "encoder_outputs" if "encoder_outputs" in self._takes else "encoder_hidden_states"
        source: dict[str, object] = {name: states}
        if seen is not None and "encoder_attention_mask" in self._takes:
            source["encoder_attention_mask"] = seen
        return source
