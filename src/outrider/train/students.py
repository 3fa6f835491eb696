"""What is trained: a head on the target's states, or a small draft of some of its layers.

Both run over frozen embeddings and output rows of the target, and know a reduced vocabulary.
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, PretrainedConfig, PreTrainedModel

from outrider.errors import ConfigurationError
from outrider.models import layer_subset, tensor_file
from outrider.models.config import decoder_of, read
from outrider.models.heads import formats
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config, HeadStates


class Student(Protocol):
    """A draft in training."""

    ids_K: Tensor  #: tokens that it proposes
    aux_layers: tuple[int, ...]  #: states of the target that it reads
    rounds: int  #: drafted tokens that it tells apart; 1: every place is like the first

    @property
    def module(self) -> nn.Module:
        """Its parameters are what is trained."""

    def read(self, tokens_BT: Tensor, states: Sequence[Tensor], rounds: int) -> list[Tensor]:
        """What its output layer reads in each round, [B, T - 1, E].

        Place t of round r is compared with the target's law behind token t + 1 + r.
        """

    def logits(self, read_ME: Tensor) -> Tensor:
        """[M, K]: over `ids_K`."""

    def write(self, folder: Path, of: str) -> None:
        """Write the folder that `load(draft=...)` reads: weights in bfloat16, a configuration."""


class HeadStudent:
    """An EAGLE-3 head of one Llama layer. Embedding and output rows are lent by the target.

    It begins as the target's last layer, which reads the embedding of the next token besides.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        ids_K: Tensor,
        aux_layers: tuple[int, ...],
        inner: int | None = None,
    ) -> None:
        table, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        _check(model, table, output)
        self.aux_layers, self.rounds = aux_layers, 4
        self.ids_K = ids_K.to(table.device)
        self.module = Eagle3(
            Eagle3Config(layer_config(model.config, inner), aux_layers, len(ids_K)),
            embedding_VE=table,
            output_KE=output.detach()[self.ids_K].float(),
            ids_K=self.ids_K,
        ).to(table.device, torch.float32)
        _begin(self.module, model, len(aux_layers))

    def read(self, tokens_BT: Tensor, states: Sequence[Tensor], rounds: int) -> list[Tensor]:
        made = unroll(self.module, tokens_BT, states, rounds)
        return [each.read_BQE for each in made]

    def logits(self, read_ME: Tensor) -> Tensor:
        return self.module.logits(HeadStates(read_ME, read_ME))

    def write(self, folder: Path, of: str) -> None:
        formats.save(copy.deepcopy(self.module).to("cpu", torch.bfloat16), folder, of)


def _check(model: PreTrainedModel, table: Tensor, output: Tensor) -> None:
    """Refuse a target that cannot lend its embedding and output layer: ConfigurationError."""
    width = int(decoder_of(model.config).hidden_size)
    bias = model.get_output_embeddings().bias
    if table.shape[1] != width or output.shape[1] != width or bias is not None:
        raise ConfigurationError(
            f"a head borrows the target's embedding and output layer; got {type(model).__name__} "
            f"with an embedding of {list(table.shape)}, an output layer of {list(output.shape)}"
            f"{'' if bias is None else ' with a bias'} and states of width {width}; train "
            "kind='layers'"
        )


@torch.no_grad()
def _begin(head: Eagle3, model: PreTrainedModel, aux_layers: int) -> None:
    """First weights: the highest aux layer passes through, and the layer is the target's last one.

    Of a family whose layers have other parts or sizes what fits is taken; the rest stays random
    and small. After 30 steps on SmolLM2 held-out cross entropy was 4.0, from a random start 6.4.
    """
    width = head.width
    head.fc.weight.mul_(0.1)
    same = torch.eye(width, dtype=torch.float32, device=head.device)
    head.fc.weight[:, width * (aux_layers - 1) :] += same
    last = dict(layer_subset.layers_of(model)[-1].named_parameters())
    first = next(iter(head.layers))
    for name, weight in first.named_parameters():
        given = last.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
        if name == "input_layernorm.weight":
            continue  # that of the embedding: it is read as it is
        if given is None or weight.shape[0] != given.shape[0]:
            weight.mul_(0.1 if weight.dim() > 1 else 1.0)
        elif weight.shape == given.shape:
            weight.copy_(given)
        elif weight.dim() > 1 and weight.shape[1] == 2 * given.shape[1]:
            weight.mul_(0.3)
            weight[:, given.shape[1] :] = given
    decoder: nn.Module = model.get_decoder()
    norms = dict(decoder.named_parameters())
    if "norm.weight" in norms:
        head.norm.get_parameter("weight").copy_(norms["norm.weight"])


class LayerStudent:
    """Some decoder layers of the target, trained to go without the others."""

    aux_layers: tuple[int, ...] = ()
    rounds = 1

    def __init__(self, model: PreTrainedModel, ids_K: Tensor, layers: tuple[int, ...]) -> None:
        self.ids_K = ids_K.to(model.device)
        self._layers = layers
        small = layer_subset.cut(model, layers)
        layer_subset.trim(small, self.ids_K)
        decoder: Any = small.get_decoder()
        fresh = {id(weight) for weight in layer_subset.layers_of(small).parameters()}
        for name, weight in list(decoder.named_parameters()):
            owner, _, leaf = name.rpartition(".")
            trained = id(weight) in fresh or weight.dim() == 1
            copied = nn.Parameter(copy.deepcopy(weight.detach()).float(), requires_grad=trained)
            setattr(decoder.get_submodule(owner), leaf, copied)
        head = small.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.float(), requires_grad=False)
        self.module: nn.Module = decoder
        self._head = head

    def read(self, tokens_BT: Tensor, states: Sequence[Tensor], rounds: int) -> list[Tensor]:
        made: Tensor = self.module(input_ids=tokens_BT, use_cache=False).last_hidden_state
        return [made[:, 1:]]

    def logits(self, read_ME: Tensor) -> Tensor:
        return F.linear(read_ME, self._head.weight, self._head.bias)

    def write(self, folder: Path, of: str) -> None:
        stack = layer_subset.stack_of(self.module)
        path = next(name for name, part in self.module.named_modules() if part is stack)
        weights = {
            name.replace(f"{path}.", "layers.", 1): weight.detach().bfloat16().cpu().contiguous()
            for name, weight in self.module.named_parameters()
            if weight.requires_grad
        }
        tensor_file.write({**weights, "ids": self.ids_K.cpu()}, folder / "draft.safetensors")
        about = {"of": of, "layers": list(self._layers)}
        (folder / "draft.json").write_text(json.dumps(about, indent=2) + "\n")


def layer_config(config: PretrainedConfig, inner: int | None = None) -> LlamaConfig:
    """A Llama layer as wide as the target, with heads of its size and its rotary tables."""
    given = decoder_of(config)
    width = int(given.hidden_size)
    heads = read(given, "num_attention_heads", int) or max(1, width // 64)
    size = read(given, "head_dim", int) or width // heads
    return LlamaConfig(
        hidden_size=width,
        intermediate_size=inner or read(given, "intermediate_size", int) or 4 * width,
        num_attention_heads=heads,
        num_key_value_heads=read(given, "num_key_value_heads", int) or heads,
        head_dim=size,
        num_hidden_layers=1,
        vocab_size=int(given.vocab_size),
        max_position_embeddings=read(given, "max_position_embeddings", int) or 2048,
        rms_norm_eps=read(given, "rms_norm_eps", float) or 1e-5,
        rope_parameters=read(given, "rope_parameters", dict) or {"rope_theta": 10000.0},
    )


def usual_aux_layers(layers: int) -> tuple[int, ...]:
    """A low, a middle and a high layer, as EAGLE-3 has them.

    >>> usual_aux_layers(30), usual_aux_layers(2)
    ((2, 15, 27), (0, 1))
    """
    return tuple(sorted({min(2, layers - 1), layers // 2, max(layers - 3, 0)}))


def unroll(
    head: Eagle3, tokens_BT: Tensor, states: Sequence[Tensor], rounds: int
) -> list[HeadStates]:
    """What the head makes of every place [B, T - 1] in each round.

    A head run as it drafts, for all places of a text at once: EAGLE-3's training-time test. Round 0
    reads the target's states; round r reads those that round r - 1 made at the same places. An
    entry of round r sees the entries of round 0 up to its own place, which stand for committed
    text, and at its own place those of the rounds before it: the tokens drafted so far.

    `states` are the target's [B, T, E], one for each aux layer. At place t round r has read token
    t + 1 + r, so its law is of token t + 2 + r; places too near the end repeat the last token and
    mean nothing.
    """
    given_BQE = head.fuse([state[:, :-1] for state in states])
    places = given_BQE.shape[1]
    at = torch.arange(places, device=tokens_BT.device)
    causal, own = at[:, None] >= at, at[:, None] == at
    cache = DynamicCache()
    made = []
    for number in range(rounds):
        ahead = at + 1 + number
        sees = torch.cat([causal, *[own] * number], 1)
        mask = torch.zeros(sees.shape, dtype=given_BQE.dtype, device=sees.device)
        mask = mask.masked_fill(~sees, torch.finfo(given_BQE.dtype).min)[None, None]
        tokens = tokens_BT[:, ahead.clamp(max=places)]
        out = head(tokens, given_BQE, ahead[None], mask, cache)
        given_BQE = out.next_BQE
        made.append(out)
    return made
