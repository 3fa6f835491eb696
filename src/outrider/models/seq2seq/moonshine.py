"""Moonshine reads which states are there from the encoder's own output object."""

from torch import Tensor
from transformers.models.moonshine.modeling_moonshine import MoonshineEncoderModelOutput

from outrider.models.seq2seq.runner import Seq2SeqRunner


class MoonshineRunner(Seq2SeqRunner):
    """Moonshine: the mask goes with the states."""

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """The encoder's own output object."""
        outputs = MoonshineEncoderModelOutput(last_hidden_state=states, attention_mask=seen)
        return {"encoder_outputs": outputs}
