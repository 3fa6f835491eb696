"""What reads the sources of encoder-decoders: text, audio or pixels through the model's encoder."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models.model_lock import evaluating, parts_of
from outrider.models.seq2seq.input_modality import InputModality, modality_of, there
from outrider.types import Encoded, Inputs, RowStore

_SEED = 21  #: of made-up states


class StatesReader:
    """No encoder, or none in use: states come from the target's."""

    shares = True

    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        """`keeper` makes what a cache keeps; `wide` is the width of the encoder's states."""
        self.model, self._keeper, self._wide = model, keeper, wide

    def examine(self, inputs: Inputs) -> None:
        """Refuse states of another width: ConfigurationError."""
        check_width(self.encode(inputs), self._wide)

    def encode(self, inputs: Inputs) -> Encoded:
        """The states that are there."""
        assert inputs.encoded is not None, "inputs without states for a model without an encoder"
        return inputs.encoded

    def keep(self, encoded: Encoded) -> RowStore:
        """Cross-attention keys and values of these states."""
        check_width(encoded, self._wide)
        return self._keeper(encoded)

    def probe(self, rows: int) -> Inputs:
        """Made-up states of different lengths, the same at every call."""
        encoded = made_up_states([24 - row % 3 for row in range(rows)], self._wide)
        return _moved(Inputs(None, None, encoded.mask_BT, encoded), self.model)


class EncoderReader(StatesReader):
    """A model's own encoder, and what its decoder keeps of the states."""

    shares = False

    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        super().__init__(model, keeper, wide)
        self.kind, self._parts = self.modality(), parts_of(model)

    def modality(self) -> InputModality:
        """What the encoder reads."""
        return modality_of(self.model)

    def examine(self, inputs: Inputs) -> None:
        """Refuse what the encoder cannot read: ConfigurationError."""
        if inputs.encoded is None:
            self.kind.examine(inputs)
        else:
            check_width(inputs.encoded, self._wide)

    @torch.no_grad()
    def encode(self, inputs: Inputs) -> Encoded:
        """The encoder's states of rows that can be read together, one group after another."""
        read, order, whole = _moved(inputs, self.model), list[int](), None
        for group in self.kind.groups(inputs):
            alike = read.take(group)
            states = self.states(alike)
            mask = states.new_ones(states.shape[:2], dtype=torch.bool)
            if inputs.ids_BS is not None:
                mask = alike.mask_BS[:, : states.shape[1]]
            part = Encoded(states, mask)
            into = range(len(order), len(order) + len(group))
            whole = part if whole is None else whole.put(into, part)
            order += group
        assert whole is not None, "no rows to encode"
        return whole.take([order.index(row) for row in range(len(order))])

    def states(self, inputs: Inputs) -> Tensor:
        """The encoder's states [B, T, E] of rows read together."""
        with evaluating(self.model, self._parts):
            states: Tensor = self.model.get_encoder()(**self.asked(inputs)).last_hidden_state
        return states

    def asked(self, inputs: Inputs) -> dict[str, Tensor]:
        """What transformers' encoder, and its whole model, is asked for rows read together."""
        return self.kind.asked(inputs, self.model.dtype)

    def probe(self, rows: int) -> Inputs:
        """Small made-up sources, the same at every call, of different lengths where they may be.

        Their states are made up as well, so that a check need not wait for an encoder;
        `probe(2)._replace(encoded=None)` has it read them.
        """
        made, lengths = self.kind.made_up(rows)
        return _moved(made._replace(encoded=made_up_states(lengths, self._wide)), self.model)


def check_width(encoded: Encoded, wide: int) -> None:
    """Refuse states of an encoder that is not this decoder's: ConfigurationError."""
    given = encoded.states_BTE.shape[-1]
    if given != wide:
        raise ConfigurationError(
            f"the decoder attends to states of width {wide}; got states of width {given}; a model "
            "that shares the target's encoder must be made for it: share_encoder=False, or "
            "another draft model"
        )


def made_up_states(lengths: list[int], wide: int) -> Encoded:
    """States of so many rows, the same at every call."""
    random = torch.Generator().manual_seed(_SEED)
    shape = len(lengths), max(lengths), wide
    states = torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")
    return Encoded(states, there(lengths))


def _moved(inputs: Inputs, model: PreTrainedModel) -> Inputs:
    """The inputs where the model can read them."""
    ids, features, mask, encoded, _ = inputs
    device = model.device
    if encoded is not None:
        states = encoded.states_BTE.to(device, model.dtype)
        encoded = Encoded(states, encoded.mask_BT.to(device))
    return Inputs(
        None if ids is None else ids.to(device),
        None if features is None else features.to(device),
        mask.to(device),
        encoded,
    )
