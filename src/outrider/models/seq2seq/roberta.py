"""RoBERTa as the decoder of a composite: its positions begin behind the padding's number."""

from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils import ModelOutput

from outrider.models.hf import Mask
from outrider.models.seq2seq.runner import Seq2SeqRunner


class RobertaRunner(Seq2SeqRunner):
    """A decoder of the RoBERTa kin: the first token stands at `pad_token_id + 1`."""

    def __init__(self, model: PreTrainedModel, shares: bool = False) -> None:
        super().__init__(model, shares)
        self.context -= self._first_position()

    def _first_position(self) -> int:
        return int(self.config.pad_token_id) + 1

    def _ask(
        self,
        tokens_BQ: Tensor,
        past: EncoderDecoderCache | None,
        source: dict[str, object],
        mask: Mask | None = None,
        positions_BQ: Tensor | None = None,
        taps: tuple[int, ...] = (),
    ) -> ModelOutput:
        if positions_BQ is not None:
            positions_BQ = positions_BQ + self._first_position()
        return super()._ask(tokens_BQ, past, source, mask, positions_BQ, taps)
