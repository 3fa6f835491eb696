"""Where a head comes from: a folder, and the target that lends what the folder leaves out."""

import dataclasses
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models import weight_only
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, folder_fields, read, vocabulary_of
from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import eagle3, formats
from outrider.models.heads.autoregressive_head import AutoregressiveHead, StateHead
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config
from outrider.models.heads.model import HeadModel
from outrider.models.load_checks import ordinary
from outrider.models.sources import ModelSource

_TEXT = "The first step is to read the text, and then to write down what it says, word by word."


class HeadSource(TargetBoundSource):
    """A head of a target by its folder; what it does not have is lent by the target.

    Raises ConfigurationError for a folder that cannot be read and for what it asks for that is not
    computed here, VocabularyMismatch for tokens that the target does not know.
    """

    takes_int8 = True
    kind = "eagle3"  #: as the speculators layout calls it
    fields: frozenset[str] = frozenset()  #: of its config.json, beside an EAGLE-3 head's

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with a head."""
        return formats.layout(folder_fields(given)) is not None

    def __init__(self, target: ModelSource, given: str | Path) -> None:
        super().__init__(target, Path(given))
        decoder = decoder_of(target.config)
        self._read = formats.read(self.given, decoder, self.kind, self.fields)
        self._aux_layers: tuple[int, ...] | None = (
            self._read.config.aux_layers if self._read.sure else None
        )
        self.draft_dtype = self._read.draft_dtype  #: what it is best kept in; None: as the target
        self.config: PretrainedConfig = self._read.config.layer
        size, vocab = self._read.config.draft_vocab_size, int(self.config.vocab_size)
        self.ids_K = formats.known_ids(self.given, self._read.weights, size, vocab)
        formats.same_vocabulary(str(self), vocab, target, vocabulary_of(target.config))

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> HeadModel:
        model = self.target.model(setting.dtype, device)
        if self._aux_layers is None:
            self._aux_layers = self._measured(model, setting.dtype)
        head = self.head(model, self._aux_layers, setting.dtype)
        int8 = setting.draft_dtype == "int8"
        if eagle3.fits(head):
            positions = read(decoder_of(self.target.config), "max_position_embeddings", int) or 0
            made = eagle3.Eagle3Llama(head, setting.packed, positions, int8)
            return HeadModel(self.runner(made, head), vocab)
        if setting.packed or int8:
            head.pack(int8)
        return HeadModel(self.runner(head, head), vocab)

    def module(self, config: Eagle3Config, **lent: Tensor | None) -> Eagle3:
        """The module, without its weights."""
        return Eagle3(config, **lent)

    def runner(self, head: StateHead, module: Eagle3) -> AutoregressiveHead:
        """What drafts with it; `head` may be a faster form of the module."""
        return AutoregressiveHead(head)

    def head(self, model: PreTrainedModel, aux_layers: tuple[int, ...], dtype: str) -> Eagle3:
        """The module with its weights, reading these states of its target."""
        config = dataclasses.replace(self._read.config, aux_layers=aux_layers)
        weights = self._read.weights
        self._check_lender(model, int(config.layer.hidden_size))
        lent = formats.lent(model, weights, self.ids_K)
        head = self.module(config, **lent, ids_K=self.ids_K)
        formats.settle(head, weights, str(self), dtype, model.device)
        if weight_only.applies_to(dtype, model.device):
            weight_only.keep(head, "bfloat16", f"the head {self}")
        return head

    def _check_lender(self, model: PreTrainedModel, width: int) -> None:
        """Refuse a target whose layers do not fit where the head has none of its own."""
        have = self._read.weights
        embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
        if "embed_tokens.weight" not in have and embedding.weight.shape[1] != width:
            raise ConfigurationError(
                f"the head {self} has no embedding, and the target's is "
                f"{embedding.weight.shape[1]} wide; got a head of width {width}; give a whole "
                "checkpoint"
            )
        if "lm_head.weight" in have:
            return
        if output.weight.shape[1] != width or output.bias is not None:
            raise ConfigurationError(
                f"the head {self} has no output layer, and the target's does not fit; got one of "
                f"{list(output.weight.shape)}; give a whole checkpoint"
            )

    def _measured(self, model: PreTrainedModel, dtype: str) -> tuple[int, ...]:
        """Which of the two ways to count layers the head was trained with.

        By how much its laws and the target's overlap on a text, state by state.
        """
        aux_layers = self._read.config.aux_layers
        layers = int(decoder_of(model.config).num_hidden_layers)
        ways = [aux_layers, tuple(layer + 1 for layer in aux_layers)]
        ways = [way for way in ways if max(way) < layers]
        tokens = self._text(model.device)
        return max(ways, key=lambda way: overlap(self.head(model, way, dtype), model, tokens))

    def _text(self, device: torch.device) -> Tensor:
        tokenizer = self.target.tokenizer()
        if tokenizer is None:
            steps = torch.arange(32, device=device)
            return ordinary(steps * 7, int(self.config.vocab_size))[None]
        return torch.tensor([tokenizer(_TEXT)["input_ids"]], device=device)

    def __str__(self) -> str:
        if self._aux_layers is None or self._read.sure:
            return str(self.given)
        return f"{self.given} (states after {', '.join(map(str, self._aux_layers))} layers)"


@torch.inference_mode()
def overlap(head: Eagle3, model: PreTrainedModel, tokens_1T: Tensor) -> float:
    """Mean over a text of sum min(p, q): how often the head's drawn tokens would be kept.

    `p` is the target's law of each token, `q` the head's, from the target's own states.
    """
    told = model(input_ids=tokens_1T, output_hidden_states=True)
    hidden = [told.hidden_states[layer][:, :-1] for layer in head.aux_layers]
    mine = head.logits(head(tokens_1T[:, 1:], head.fuse(hidden))).float().softmax(-1)
    theirs = told.logits[:, 1:].float().softmax(-1)
    if head.ids_K is not None:
        theirs = theirs[..., head.ids_K]
    return float(torch.minimum(mine, theirs).sum(-1).mean())
