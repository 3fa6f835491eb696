"""What reads the sources of encoder-decoders: text, audio or pixels through the model's encoder."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models.config import encoder_of
from outrider.models.guard import evaluating
from outrider.models.seq2seq import probe
from outrider.types import Encoded, Inputs, RowStore

#: transformers' name of what an encoder takes -> what it is called in messages.
KINDS = {
    "input_ids": "source text",
    "input_features": "log-mel frames",
    "input_values": "samples",
    "pixel_values": "pixels",
}


class EncoderReader:
    """A model's own encoder, and what its decoder keeps of the states."""

    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        """`keeper` makes what a cache keeps; `wide` is the width of the encoder's states."""
        self.model, self._keeper, self._wide = model, keeper, wide
        self.shares = False
        self.config = encoder_of(model.config)
        self.takes: str = model.main_input_name
        self._parts = list(model.modules())

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Encoded:
        """The encoder's states.

        Texts are read as one padded batch. Audio is read in groups of one length, without padding:
        convolutions and norms over time would let the padding through.
        """
        if self.takes == "input_ids":
            return Encoded(self._states(inputs), inputs.mask_BS[:, : _longest(inputs.mask_BS)])
        lengths = inputs.mask_BS.sum(1).tolist()
        rows, order, whole = range(len(lengths)), list[int](), None
        for length in dict.fromkeys(lengths):
            group = [row for row in rows if lengths[row] == length or self.takes == "pixel_values"]
            states = self._states(inputs.take(group))
            read = Encoded(states, states.new_ones(states.shape[:2], dtype=torch.bool))
            seats = range(len(order), len(order) + len(group))
            whole = read if whole is None else whole.put(seats, read)
            order += group
            if len(order) == len(rows):
                break
        assert whole is not None, "no rows to encode"
        return whole if order == [*rows] else whole.take([order.index(row) for row in rows])

    def _states(self, inputs: Inputs) -> Tensor:
        with evaluating(self.model, self._parts):
            states: Tensor = self.model.get_encoder()(**self.asked(inputs)).last_hidden_state
        return states

    def asked(self, inputs: Inputs) -> dict[str, Tensor]:
        """What transformers' encoder, and its whole model, is called with for these inputs.

        Raises ConfigurationError for inputs of another kind.
        """
        given = inputs.ids_BS if self.takes == "input_ids" else inputs.features
        if given is None:
            other = "features" if inputs.ids_BS is None else "source text"
            raise ConfigurationError(
                f"{type(self.model).__name__} reads {KINDS[self.takes]}; got {other}; give what "
                "its processor makes"
            )
        if self.takes == "pixel_values":
            return {"pixel_values": given.to(self.model.dtype)}
        long = _longest(inputs.mask_BS)
        if self.takes == "input_ids":
            return {"input_ids": given[:, :long], "attention_mask": inputs.mask_BS[:, :long].long()}
        given = given[:, :long].to(self.model.dtype)
        # Whisper's frames stand in columns
        return {self.takes: given.transpose(1, 2) if probe.mels(self.config) else given}

    def keep(self, encoded: Encoded) -> RowStore:
        """Cross-attention keys and values of these states."""
        return self._keeper(encoded)

    def probe(self, rows: int) -> Inputs:
        """Small made-up sources, the same at every call, of different lengths where they may be.

        Their states are made up as well, so that a check need not wait for an encoder;
        `probe(2)._replace(encoded=None)` has it read them.
        """
        made = probe.sources(self.config, self.takes, rows)
        encoded = probe.states(self.config, made.mask_BS, self.takes, self._wide)
        return probe.moved(made._replace(encoded=encoded), self.model.device, self.model.dtype)


class StatesReader:
    """No encoder: states come from the target's, and this is what the decoder keeps of them."""

    shares = True

    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        self.model, self._keeper, self._wide = model, keeper, wide

    def encode(self, inputs: Inputs) -> Encoded:
        """The states that are there; without any it raises ConfigurationError."""
        if inputs.encoded is None:
            self.asked(inputs)
        assert inputs.encoded is not None
        return inputs.encoded

    def asked(self, inputs: Inputs) -> dict[str, Tensor]:
        """Nothing can be asked of an encoder that is not there: ConfigurationError."""
        raise ConfigurationError(
            f"{type(self.model).__name__} has no encoder of its own; got inputs that are not "
            "encoded; draft with it for a target whose encoder it shares"
        )

    def keep(self, encoded: Encoded) -> RowStore:
        """Cross-attention keys and values of these states."""
        return self._keeper(encoded)

    def probe(self, rows: int) -> Inputs:
        """Made-up states of different lengths, the same at every call."""
        made = probe.sources(self.model.config, "input_ids", rows)
        encoded = probe.states(self.model.config, made.mask_BS, "input_ids", self._wide)
        made = Inputs(None, None, encoded.mask_BT, encoded)
        return probe.moved(made, self.model.device, self.model.dtype)


def _longest(mask_BS: Tensor) -> int:
    """The length of the longest source; a wait for the device, once a source."""
    return int(mask_BS.sum(1).max())
