"""BigBird-Pegasus: an encoder whose sparse attention depends on the length of the whole call.

It looks at the first and last blocks of what it is given, padding included, and a short source
switches it to full attention for good. Here every source is read at its own length, with the
attention that the configuration names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.config import encoder_of
from outrider.models.model_lock import alone
from outrider.models.seq2seq.input_modality import TextInput, by_length
from outrider.models.seq2seq.reader import EncoderReader
from outrider.models.seq2seq.runner import Seq2SeqRunner
from outrider.types import Encoded, Inputs, RowStore


@contextmanager
def _as_configured(model: PreTrainedModel) -> Iterator[None]:
    """The attention that the configuration names, before and after; one thread at a time."""
    with alone(model):
        encoder = model.get_encoder()
        encoder.set_attention_type(encoder.config.attention_type)
        try:
            yield
        finally:
            encoder.set_attention_type(encoder.config.attention_type)


class _Unpadded(TextInput):
    """Texts read in groups of one length."""

    def groups(self, inputs: Inputs) -> Sequence[Sequence[int]]:
        """Rows of one length."""
        return by_length(inputs)


class _Reader(EncoderReader):
    def __init__(
        self, model: PreTrainedModel, keeper: Callable[[Encoded], RowStore], wide: int
    ) -> None:
        super().__init__(model, keeper, wide)
        self.kind = _Unpadded(encoder_of(model.config))

    def states(self, inputs: Inputs) -> Tensor:
        """The encoder's states of rows of one length."""
        with _as_configured(self.model):
            return super().states(inputs)


class BigBirdPegasusRunner(Seq2SeqRunner):
    """BigBird-Pegasus: the decoder is BART's, the encoder is read with care."""

    encoder = _Reader

    def plain(self, tokens_1Q: Tensor, inputs: Inputs | None = None) -> Tensor:
        """Logits of a whole text by the model's own means."""
        with _as_configured(self.model):
            return super().plain(tokens_1Q, inputs)
