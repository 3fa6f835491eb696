"""Tiny heads: modules, checkpoints in each layout, and what they compute written out once more."""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import embedding, silu
from transformers import LlamaConfig, Qwen3Config

from outrider.models.heads.autoregressive_head import AutoregressiveHead
from outrider.models.heads.eagle3 import Eagle3, Eagle3Config
from outrider.models.heads.model import HeadModel
from outrider.testing import VOCAB, llama

IDS = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 14, 17, 20, 22, 25, 27, 30, 31])
FLAGS = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "all but that": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}


def eagle3(aux_layers=(0, 1, -1), kind=LlamaConfig, layers=1, seed=0, ids=IDS, **flags):
    """A random head for the tiny models, with norms that are not left at 1."""
    torch.manual_seed(seed)
    layer = kind(**(SIZES | {"num_hidden_layers": layers}))
    size = VOCAB if ids is None else len(ids)
    head = Eagle3(Eagle3Config(layer, aux_layers, size, **flags), ids_K=ids).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return head.requires_grad_(False)


def driven(device="cpu", **settings):
    """The same as a draft model."""
    return HeadModel(AutoregressiveHead(eagle3(**settings).to(device)), VOCAB)


def target(layers=6):
    """A target that is deep enough for the usual layers: 2, n / 2 and n - 3."""
    return llama(num_hidden_layers=layers)


def norm(x, weight):
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


class Reference:
    """An EAGLE-3 head by its formulas: one text, no cache, everything anew for each token.

    `hidden` are the target's states [T, E] of the committed tokens but the last, one per aux layer.
    """

    def __init__(self, head, hidden):
        self.config, self.weights = head.config, head.state_dict()
        if hidden and self.config.fc_norm:
            each = enumerate(hidden)
            hidden = [norm(x, self.weights[f"fc_norm.{layer}.weight"]) for layer, x in each]
        if hidden:
            states = torch.cat(list(hidden), -1)
            if self.config.norm_before_fc:
                states = norm(states, self.weights["input_norm.weight"])
            self.fused = states @ self.weights["fc.weight"].T

    def logits(self, tokens):
        """Over the draft's vocabulary, behind a text: entries for all of its tokens but the first.

        Where the target's states end the head's own take their place, token by token.
        """
        states = list(self.fused)
        while len(states) < len(tokens) - 1:
            states.append(self._entries(tokens[: len(states) + 1], states)[0][-1])
        _, read = self._entries(tokens, states[: len(tokens) - 1])
        return read[-1] @ self.weights["lm_head.weight"].T

    def _entries(self, tokens, states):
        """What the tokens below are given, and what the output layer reads."""
        tokens, hidden = torch.tensor(tokens[1:]), torch.stack(states)
        own = self._of("layers.0.")
        embedded = norm(
            embedding(tokens, self.weights["embed_tokens.weight"]), own["input_layernorm"]
        )
        normed = norm(hidden, own["hidden_norm"])
        residual = normed if self.config.norm_before_residual else hidden
        x = self._block(own, torch.cat([embedded, normed], -1), residual)
        for layer in range(1, self.config.layer.num_hidden_layers):
            own = self._of(f"layers.{layer}.")
            x = self._block(own, norm(x, own["input_layernorm"]), x)
        read = norm(x, self.weights["norm.weight"])
        return (read if self.config.norm_output else x), read

    def _of(self, prefix):
        return {
            name[len(prefix) : -len(".weight")].split(".")[-1]: weight
            for name, weight in self.weights.items()
            if name.startswith(prefix)
        }

    def _block(self, own, given, residual):
        count, size = len(given), 8
        at = torch.arange(1, count + 1)
        angle = at[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))

        def heads(name, turn):
            x = (given @ own[name].T).view(count, -1, size).transpose(0, 1)
            if not turn:
                return x
            if "q_norm" in own:
                x = norm(x, own[name.replace("proj", "norm")])
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat([-high, low], -1) * sin

        q, k, v = heads("q_proj", True), heads("k_proj", True), heads("v_proj", False)
        k, v = (x.repeat_interleave(2, 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2)) / size**0.5
        scores = scores.masked_fill(torch.ones(count, count).triu(1).bool(), -torch.inf)
        x = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        x = residual + x @ own["o_proj"].T
        y = norm(x, own["post_attention_layernorm"])
        return x + (silu(y @ own["gate_proj"].T) * (y @ own["up_proj"].T)) @ own["down_proj"].T


def speculators(folder, head, **changed):
    """A checkpoint in the speculators layout."""
    fields = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "draft_vocab_size": head.config.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(head.aux_layers),
        "norm_before_residual": head.config.norm_before_residual,
        "norm_before_fc": head.config.norm_before_fc,
        "fc_norm": head.config.fc_norm,
        "norm_output": head.config.norm_output,
        "embed_requires_grad": False,
        "transformer_layer_config": {"model_type": "llama", **SIZES},
        "speculators_config": {"verifier": {"name_or_path": "tiny"}},
    }
    if isinstance(head.config.layer, Qwen3Config):
        fields["transformer_layer_config"]["model_type"] = "qwen3"
    return _written(folder, fields | changed, head.state_dict())


def original(folder, head, lent=(), **changed):
    """A checkpoint as the first authors write it, without what the target lends."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "draft_vocab_size": head.config.draft_vocab_size,
        "torch_dtype": "float32",
        **SIZES,
    }
    weights = {
        name.replace("layers.0.", "midlayer."): weight
        for name, weight in head.state_dict().items()
        if name not in lent
    }
    return _written(folder, fields | changed, weights)


def _written(folder, fields, weights):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: x.contiguous() for name, x in weights.items()}, folder / "model.safetensors")
    return folder


def paths(tree, row, draft_row):
    """The tokens from the root to each node of one row's tree."""
    texts = []
    for node, parent in enumerate(tree.parent_BN[min(row, len(tree.parent_BN) - 1)].tolist()):
        above = texts[parent] if parent >= 0 else []
        texts.append([*above, draft_row[node]])
    return texts


__all__ = [
    "FLAGS",
    "IDS",
    "Reference",
    "driven",
    "eagle3",
    "original",
    "paths",
    "speculators",
    "target",
]
