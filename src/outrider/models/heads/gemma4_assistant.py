"""Gemma 4's assistants: small decoders that read their target's keys and values, and write none.

Their layers have queries alone. Of each type of layer (full, sliding) the keys and values are those
of the target's last layer of that type that makes its own; a drafted token reads its own embedding
by the target's table beside the state of the token before it, and stands where the pending token
stands, whatever its depth:

    x   = pre_projection([embedding(token); state])      the target's state, or the assistant's own
    y   = layers(x at the pending token's position, keys and values of the text before it)
    law = softmax(lm_head(y)),   state behind it = post_projection(y)

Keys and values are made once more here, by the target's own projections of the states that enter
those two layers: so an assistant is told states, as every head is, and keeps what it is told.
transformers shows it the entry of a rejected draft beside them; nothing here does.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import rotate_half

from outrider.errors import ConfigurationError
from outrider.models import pretrained, unsupported, weight_only
from outrider.models.auto_classes import auto_class
from outrider.models.calibrate import Setting
from outrider.models.config import decoder_of, folder_fields, vocabulary_of
from outrider.models.decoder import additive
from outrider.models.draft_source import TargetBoundSource
from outrider.models.heads import formats
from outrider.models.heads.autoregressive_head import HeadCache, parents
from outrider.models.heads.model import HeadModel, write_states
from outrider.models.model_lock import CONFIGURATION
from outrider.models.sources import ModelSource
from outrider.models.weight_only import states_dtype
from outrider.tree import numbers
from outrider.types import Nodes, TargetStates

KINDS = ("gemma4_assistant", "gemma4_unified_assistant")
#: What they are made for.
TARGETS = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")


@contextmanager
def layers_without_keys(text: PretrainedConfig) -> Iterator[None]:
    """Let transformers build a decoder none of whose layers makes keys: 5.23 takes its
    configuration for a mistake (`kv_sharing_modes`), older versions do not have the question.

    >>> with layers_without_keys(config.text_config):                       # doctest: +SKIP
    ...     Gemma4AssistantForCausalLM(config)
    """
    kind = type(text)
    own = vars(kind).get("kv_sharing_modes")
    if not isinstance(own, property):
        yield
        return

    def modes(config: Any) -> Any:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        return own.fget(config) if own.fget else None

    with CONFIGURATION:
        type.__setattr__(kind, "kv_sharing_modes", property(modes))
        try:
            yield
        finally:
            type.__setattr__(kind, "kv_sharing_modes", own)


class KVLayer(NamedTuple):
    """A layer of the target whose keys and values an assistant reads."""

    kind: str  #: full_attention or sliding_attention
    number: int  #: so many layers stand before it
    layer: nn.Module


def kv_layers(decoder: nn.Module, config: PretrainedConfig) -> list[KVLayer]:
    """Of each type of layer the last one that makes keys and values of its own."""
    kinds = config.layer_types[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
    last = {kind: number for number, kind in enumerate(kinds)}
    layers = decoder.get_submodule("layers")
    return [KVLayer(kind, at, layers.get_submodule(str(at))) for kind, at in sorted(last.items())]


class KVSharedHead:
    """A `HeadRunner` over an assistant beside its target.

    >>> HeadModel(KVSharedHead(assistant, target), vocab_size=262144).aux_layers  # doctest: +SKIP
    (23, 22, -1)
    """

    follows = False
    ids_K: Tensor | None = None

    def __init__(self, assistant: PreTrainedModel, target: PreTrainedModel) -> None:
        self.assistant: Any = assistant
        self._embed = target.get_input_embeddings()
        decoder = target.get_decoder()
        self._rotary = decoder.get_submodule("rotary_emb")
        self._layers = kv_layers(decoder, decoder_of(target.config))
        self.aux_layers = (*(one.number for one in self._layers), -1)
        self.width = int(assistant.config.backbone_hidden_size)
        self._window = int(decoder_of(assistant.config).sliding_window)
        self.device = torch.device(assistant.device)
        self.dtype: torch.dtype = self.assistant.model.norm.weight.dtype

    def open(self, rows: int, capacity: int) -> HeadCache:
        """An empty cache, with the target's keys and values of each type of layer."""
        return HeadCache.of(len(self._layers), rows, capacity, self.device)

    def learn(self, cache: HeadCache, target: TargetStates) -> None:
        """Make keys and values of these tokens."""
        if target.hidden and target.slots_BQ.shape[1]:
            *entering, behind = target.hidden
            cache.entries.begin(target.slots_BQ, target.wide, 0)
            for number, (one, state) in enumerate(zip(self._layers, entering, strict=True)):
                keys, values = self._keys(one, state, target.positions_BQ)
                cache.entries.update(keys.to(self.dtype), values.to(self.dtype), number)
            write_states(cache.told, target.slots_BQ, target.wide, behind.to(self.dtype))
        cache.known_B.copy_(target.known_B)

    def _keys(self, one: KVLayer, state: Tensor, positions_BQ: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, Q, E] of a layer that these states [B, Q, E'] enter."""
        attention: Any = one.layer.get_submodule("self_attn")
        given = one.layer.get_submodule("input_layernorm")(state)
        raw = attention.k_proj(given).unflatten(-1, (-1, attention.head_dim))
        values = raw
        if attention.v_proj is not None:
            values = attention.v_proj(given).unflatten(-1, (-1, attention.head_dim))
        cos, sin = (part[:, :, None] for part in self._rotary(state, positions_BQ, one.kind))
        keys = attention.k_norm(raw)
        keys = keys * cos + rotate_half(keys) * sin
        return keys.transpose(1, 2), attention.v_norm(values).transpose(1, 2)

    def keep(self, cache: HeadCache, first_B: Tensor, path_BD: Tensor) -> None:
        cache.entries.keep(first_B, path_BD)
        cache.told.keep(first_B, path_BD)

    def logits(self, cache: HeadCache, nodes: Nodes, last: int | None) -> Tensor:
        """[B, Q or last, V]; it keeps no text, so nothing but the last nodes is run."""
        if last is not None:
            nodes = nodes.last(last)
        tokens_BQ, slots_BQ = nodes.tokens_BQ, nodes.slots_BQ
        state = cache.states(parents(nodes), self.width, self.dtype)
        embedded = self._embed(tokens_BQ).to(self.dtype)
        x = self.assistant.pre_projection(torch.cat([embedded, state], -1))
        wide = nodes.visible_BQW.shape[-1]
        shared, masks = self._context(cache, slots_BQ.shape[1], wide)
        read: Tensor = self.assistant.model(
            inputs_embeds=x,
            attention_mask=masks,
            position_ids=cache.known_B[:, None].expand_as(slots_BQ),
            shared_kv_states=shared,
            use_cache=False,
            output_hidden_states=True,  # or else it drops all nodes but the last from the start
        ).last_hidden_state
        behind = self.assistant.post_projection(read)
        write_states(cache.own, slots_BQ, wide, behind)
        return self._said(read)

    def _context(
        self, cache: HeadCache, queries: int, wide: int
    ) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
        """Keys and values of the text by type of layer, and what nodes see of them."""
        shared: dict[str, tuple[Tensor, Tensor]] = {}
        masks: dict[str, Tensor] = {}
        known_B1 = cache.known_B[:, None]
        for number, one in enumerate(self._layers):
            layer = cache.entries.layers[number]
            attention: Any = one.layer.get_submodule("self_attn")
            heads = attention.k_proj.out_features // attention.head_dim
            like = torch.zeros(0, dtype=self.dtype, device=self.device)
            keys, values = (
                buffer[: len(known_B1), :, :wide]
                for buffer in layer.buffers(heads, attention.head_dim, like)
            )
            slot_W = numbers(keys.shape[2], self.device)
            seen = slot_W < known_B1
            if one.kind == "sliding_attention":  # as transformers counts: the ends are in it
                seen = seen & (known_B1 - 1 - slot_W <= self._window)
            shared[one.kind] = keys, values
            seen_BQW = seen[:, None].expand(-1, queries, -1)
            masks[one.kind] = additive(seen_BQW, self.dtype)
        return shared, masks

    def _said(self, read_BQE: Tensor) -> Tensor:
        """[B, Q, V]; with an ordered vocabulary -inf for what is in none of the best clusters."""
        table, few = self.assistant.lm_head.weight, self.assistant.masked_embedding
        if few is None:
            logits: Tensor = self.assistant.lm_head(read_BQE)
            return logits
        best = few.centroids(read_BQE).topk(few.centroid_intermediate_top_k, -1).indices
        ids = few.token_ordering.view(few.num_centroids, -1)[best].flatten(-2)
        said = (table[ids] @ read_BQE[..., None])[..., 0]
        full = torch.full_like(said[..., :1], -torch.inf).repeat(1, 1, few.vocab_size)
        law: Tensor = full.scatter(-1, ids, said)
        return law


class Gemma4AssistantSource(TargetBoundSource):
    """An assistant of a Gemma 4 target, by its folder or as transformers has loaded it.

    Raises ConfigurationError for a folder that cannot be read and for a target of other sizes,
    VocabularyMismatch for tokens that the target does not know.
    """

    @classmethod
    def reads(cls, given: object) -> bool:
        """Whether this names a folder with an assistant, or is one."""
        if isinstance(given, PreTrainedModel):
            return given.config.model_type in KINDS
        return folder_fields(given).get("model_type") in KINDS

    def __init__(self, target: ModelSource, given: Any) -> None:
        super().__init__(target, given)
        whole = given.config if isinstance(given, PreTrainedModel) else self._configuration()
        self._name = Path(str(self))
        kind, wide = target.config.model_type, int(decoder_of(target.config).hidden_size)
        if kind not in TARGETS or whole.backbone_hidden_size != wide:
            raise formats.bad_head(
                self._name,
                f"a Gemma 4 target of width {whole.backbone_hidden_size} to read: {target} is "
                f"{kind!r} of width {wide}",
                "use it with the target that it was made for",
            )
        self.config = decoder_of(whole)
        known = vocabulary_of(target.config)
        formats.same_vocabulary(str(self), vocabulary_of(self.config), target, known)

    def _configuration(self) -> PretrainedConfig:
        try:
            return pretrained.read_config(str(self.given), trust=False)
        except Exception as error:  # whatever somebody else's file makes transformers raise
            raise formats.bad_head(
                Path(self.given),
                f"a config.json that transformers cannot use ({type(error).__name__}: {error})",
                "give a whole checkpoint, or install a newer transformers",
            ) from error

    def driven(
        self, setting: Setting, device: torch.device, vocab: int, shares: bool = False
    ) -> HeadModel:
        model = self.target.model(setting.dtype, device)
        assistant = self._loaded(setting.dtype, device)
        head = KVSharedHead(assistant, model)
        self._check_sizes(assistant, head.aux_layers, model)
        return HeadModel(head, vocab)

    def _loaded(self, dtype: str, device: torch.device) -> PreTrainedModel:
        if isinstance(self.given, PreTrainedModel):
            made = self.given
        else:
            how = {"dtype": states_dtype(dtype, device), "attn_implementation": "sdpa"}
            kind = auto_class(pretrained.read_config(str(self.given), trust=False))
            try:
                with layers_without_keys(self.config):
                    made = pretrained.read_model(kind, str(self.given), False, **how)
            except (OSError, RuntimeError, ValueError) as error:
                raise ConfigurationError(
                    f"cannot read the assistant {self}; got {type(error).__name__}: "
                    f"{str(error)[:200]}; give a whole checkpoint"
                ) from error
            made.to(device).requires_grad_(False)
            if weight_only.applies_to(dtype, device):
                weight_only.keep(made, "bfloat16", f"the assistant {self}")
        unsupported.check_numbers(dict(made.named_parameters()), f"the assistant {self}")
        return made.eval()

    def _check_sizes(
        self, assistant: PreTrainedModel, aux_layers: tuple[int, ...], model: PreTrainedModel
    ) -> None:
        """Refuse an assistant whose queries do not fit the target's keys."""
        have = {
            one.kind: _sizes(one.layer)
            for one in kv_layers(model.get_decoder(), decoder_of(model.config))
        }
        layers = assistant.get_submodule("model.layers").children()
        asked = {}
        for kind, layer in zip(self.config.layer_types, layers, strict=True):
            attention: Any = layer.get_submodule("self_attn")
            heads = self.config.num_attention_heads // attention.num_key_value_groups
            asked[kind] = heads, attention.head_dim
        if any(have.get(kind) != size for kind, size in asked.items()):
            raise formats.bad_head(
                self._name,
                f"queries for keys of (heads, size) {_said(asked)}; the target has {_said(have)}",
                "use it with the target that it was made for",
            )

    def __str__(self) -> str:
        if isinstance(self.given, PreTrainedModel):
            return type(self.given).__name__
        return str(self.given)


def _sizes(layer: nn.Module) -> tuple[int, int]:
    """Heads of keys of a layer, and their size."""
    attention: Any = layer.get_submodule("self_attn")
    return attention.k_proj.out_features // attention.head_dim, attention.head_dim


def _said(sizes: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{kind} {size}" for kind, size in sorted(sizes.items()))
