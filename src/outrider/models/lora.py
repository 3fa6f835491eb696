"""LoRA adapters over one target, each row's own: their weights beside the layers that they change.

A layer's product is the base's for all rows of a call; behind it every row has the two small
products of its own adapter added, `up(down(x))`, as peft does where an adapter is not merged (Hu et
al. 2021; vLLM's and Punica's batches of several). Rows without one are the base's to the bit. Which
row has which is known on the host: the target's cache says so (`SlotCache.adapters`).
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel
from outrider.models import peft_models, weight_only
from outrider.models.config import read
from outrider.models.linear import Product, product, steady
from outrider.models.weight_only import finite

Adapters: TypeAlias = tuple[str | None, ...]  #: of each row, by name; None: the base alone

_PREFIX = "base_model.model."
#: Fields of an adapter's configuration that make it more than two products, and what is meant.
_MORE = {
    "use_dora": "DoRA norms each changed weight",
    "modules_to_save": "it brings whole modules",
    "lora_bias": "its products have biases",
    "alora_invocation_tokens": "it begins in the middle of a text",
    "trainable_token_indices": "it brings embeddings of its own",
    "target_parameters": "it changes parameters that are no linear layer's",
}


class LoraWeights(NamedTuple):
    """What an adapter adds to one layer: up(down(x)), the scaling in `up`."""

    down_RI: Tensor
    up_OR: Tensor


def read_lora(name: str, folder: str | Path) -> dict[str, LoraWeights]:
    """The weights in an adapter's folder by the names of the layers that they change.

    Raises ConfigurationError for a folder that holds no LoRA adapter in safetensors, or one that is
    more than two products a layer: merged into its base it runs, given as the target.
    """
    path = Path(folder)

    def refuse(why: str, do: str) -> ConfigurationError:
        return ConfigurationError(
            f"the adapter {name!r} cannot be served beside others: {why}; got {str(folder)!r}; {do}"
        )

    file = path / peft_models.WEIGHTS
    if not file.is_file():
        raise refuse(f"there is no {peft_models.WEIGHTS}", "give the folder of a LoRA adapter")
    said = peft_models.settings(path)
    merge = "give it alone, as the target, where it is merged"
    if said.get("peft_type", "LORA") != "LORA":
        raise refuse(f"it is of kind {said['peft_type']}", merge)
    for field, meant in _MORE.items():
        if said.get(field):
            raise refuse(f"{meant} ({field})", merge)
    if said.get("bias", "none") != "none":
        raise refuse(f"it changes biases (bias={said['bias']!r})", merge)
    parts: dict[str, dict[str, Tensor]] = {}
    try:
        with safe_open(file, "pt") as stored:
            for key in stored.keys():
                layer, _, part = key.removeprefix(_PREFIX).rpartition(".lora_")
                if part not in ("A.weight", "B.weight"):
                    raise refuse(f"it has {key}", merge)
                parts.setdefault(layer, {})[part[0]] = stored.get_tensor(key).float()
    except ConfigurationError:
        raise
    except Exception as error:  # the safetensors library raises one of its own
        raise refuse(f"{peft_models.WEIGHTS}: {error}", "download it again") from error
    found: dict[str, LoraWeights] = {}
    for layer, both in parts.items():
        if both.keys() != {"A", "B"}:
            raise refuse(f"it has half of {layer}", "download it again")
        down_RI, up_OR = both["A"], both["B"]
        if not (finite(down_RI) and finite(up_OR)):
            raise refuse(f"its weights of {layer} are no numbers", "download it again")
        found[layer] = LoraWeights(down_RI, up_OR * _scaling(said, layer, down_RI.shape[0]))
    if not found:
        raise refuse("it changes nothing", "give the folder of a trained adapter")
    return found


def _scaling(said: Mapping[str, Any], layer: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) of a rank-stabilised one; layers may have their own."""
    own = dict(said.get("alpha_pattern") or {})
    alpha = next((a for part, a in own.items() if f".{layer}".endswith(f".{part}")), None)
    alpha = float(said.get("lora_alpha", 8) if alpha is None else alpha)
    return alpha / (rank**0.5 if said.get("use_rslora") else rank)


def _alike(weight: Tensor) -> Product:
    """A product that has a row's bits in calls of any number of rows: the layers behind it may
    round what they are given, and then much hangs on a last bit."""
    kernels = weight_only.unsupported_reason(weight.device) is None
    ours = kernels and weight.dtype == torch.float32
    return product(weight, None, packed=ours, compiled=ours)


class LoraAdapter:
    """One adapter's weights by layer, and the products that were made of them."""

    def __init__(self, weights: Mapping[str, LoraWeights]) -> None:
        self.weights = weights
        self._made: dict[tuple[tuple[str, ...], torch.dtype], tuple[Product, Product] | None] = {}

    def products(
        self, layers: tuple[str, ...], sizes: Sequence[int], like: Tensor
    ) -> tuple[Product, Product] | None:
        """What it adds to these layers as one, for x as `like`: down and up; None: nothing."""
        key = layers, like.dtype
        if key not in self._made:
            joined = self._joined(layers, sizes)
            self._made[key] = None
            if joined is not None:
                down, up = (_alike(w.to(like.device, like.dtype)) for w in joined)
                self._made[key] = down, up
        return self._made[key]

    def _joined(self, layers: Sequence[str], sizes: Sequence[int]) -> LoraWeights | None:
        """The weights of layers whose outputs stand side by side, as those of one layer."""
        own = [self.weights.get(layer) for layer in layers]
        downs = [weights.down_RI for weights in own if weights is not None]
        if not downs:
            return None
        wide = sum(down.shape[0] for down in downs)
        up_OR = torch.zeros(sum(sizes), wide, dtype=torch.float32, device="cpu")
        first = at = 0
        for weights, size in zip(own, sizes, strict=True):
            if weights is not None:
                rank = weights.up_OR.shape[1]
                up_OR[first : first + size, at : at + rank] = weights.up_OR
                at += rank
            first += size
        return LoraWeights(torch.cat(downs), up_OR)


class _Call(NamedTuple):
    """The rows of a call under way."""

    batch: int
    nodes: int
    rows: tuple[tuple[LoraAdapter, Tensor | None], ...]  #: which have which adapter; None: all


class _Calls(threading.local):
    """The one that this thread is in."""

    now: _Call | None = None


class LoraBank:
    """The adapters over one model, by name.

    The products of its layers are made by `adapted` (a lean runner's) or by `attach` (for a model's
    own forward).

    >>> from outrider.testing import llama
    >>> LoraBank(llama()).names
    ()
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.what = type(model).__name__
        self._sizes: dict[str, tuple[int, int]] = {}  # outputs and inputs
        for name, part in model.named_modules():
            if isinstance(part, Conv1D):
                self._sizes[name] = (part.nf, part.nx)
            elif read(part, "in_features", int) and read(part, "out_features", int):
                self._sizes[name] = (part.out_features, part.in_features)
        self._adapters: dict[str, LoraAdapter] = {}
        self._adapted: set[str] = set()
        self._calls = _Calls()

    @property
    def names(self) -> tuple[str, ...]:
        """Of the adapters, in the order in which they came."""
        return tuple(self._adapters)

    def add(self, name: str, folder: str | Path) -> None:
        """Read one more, once the layers are adapted.

        Raises ConfigurationError where it is made for another base.
        """
        weights = read_lora(name, folder)
        for layer, (down_RI, up_OR) in weights.items():
            size, wanted = self._sizes.get(layer), (up_OR.shape[0], down_RI.shape[1])
            if size == wanted and layer in self._adapted:
                continue
            there = "is no linear layer" if size is None else f"is {size[0]} x {size[1]}"
            if size == wanted:
                there = "is not called with whole rows"
            base = peft_models.settings(Path(folder)).get("base_model_name_or_path")
            raise ConfigurationError(
                f"the adapter {name!r}, made for {base!r}, does not fit the target {self.what}: it "
                f"changes {layer}, {wanted[0]} x {wanted[1]}, which {there} there; got "
                f"{str(folder)!r}; give one that was trained on this target"
            )
        self._adapters[name] = LoraAdapter(weights)

    def remove(self, name: str) -> None:
        """Forget one, of which no row is left. Raises UnknownName."""
        del self._adapters[self.known(name)]

    def known(self, name: str) -> str:
        """The name, if there is an adapter of it. Raises UnknownName."""
        if name not in self._adapters:
            raise UnknownName("adapter", name, self.names)
        return name

    @contextmanager
    def of(self, rows: Adapters, nodes: int, device: torch.device) -> Iterator[None]:
        """Layers called in here are called for rows with these adapters, of so many nodes each."""
        named = sorted({name for name in rows if name is not None})
        if not named:
            yield
            return
        places: list[tuple[LoraAdapter, Tensor | None]] = []
        for name in named:
            at = [row for row, other in enumerate(rows) if other == name]
            some = None if len(at) == len(rows) else torch.tensor(at, device=device)
            places.append((self._adapters[self.known(name)], some))
        before, self._calls.now = self._calls.now, _Call(len(rows), nodes, tuple(places))
        try:
            yield
        finally:
            self._calls.now = before

    def adapted(self, run: Product, layers: Sequence[str]) -> Product:
        """A product of some layers over the same x, outputs side by side, with what rows add."""
        self._adapted.update(layers)
        names, sizes = tuple(layers), [self._sizes[layer][0] for layer in layers]
        return lambda x: self.added(run(x), x, names, sizes)

    def attach(self, model: PreTrainedModel) -> None:
        """Adapt its linear layers by row, packed ones, too.

        Not those of experts, which are called with some of the nodes alone.
        """
        for name, part in model.named_modules():
            if name not in self._sizes or ".experts." in name:
                continue
            own = vars(part).get("forward")
            plain = own is None and type(part) is torch.nn.Linear
            run = own or (steady(part) if plain else None) or part.forward
            vars(part)["forward"] = self.adapted(run, [name])

    def added(
        self, out: Tensor, x: Tensor, layers: tuple[str, ...], sizes: Sequence[int]
    ) -> Tensor:
        """The layers' output `out` of x, and what the adapters of this call's rows add.

        Raises UnsupportedModel for a layer that is called with anything but whole rows.
        """
        call = self._calls.now
        if call is None:
            return out
        if x.dim() > 2 and x.shape[0] == call.batch:
            x_BQI = x.reshape(call.batch, -1, x.shape[-1])
        elif x.shape[:-1].numel() == call.batch * call.nodes:
            x_BQI = x.reshape(call.batch, call.nodes, x.shape[-1])
        else:
            raise UnsupportedModel(
                f"adapters by row are for layers that are called with whole rows; got {self.what}, "
                f"whose {layers[0]} is called with {list(x.shape)} for {call.batch} rows of "
                f"{call.nodes} nodes; give the adapter alone, as the target, where it is merged"
            )
        whole = out.reshape(*x_BQI.shape[:2], out.shape[-1])
        for adapter, rows in call.rows:
            both = adapter.products(layers, sizes, x)
            if both is None:
                continue
            down, up = both
            if rows is None:
                whole = whole + up(down(x_BQI)).to(out.dtype)
            else:
                more = up(down(x_BQI.index_select(0, rows))).to(out.dtype)
                whole = whole.index_add(0, rows, more)
        return whole.reshape(out.shape)
