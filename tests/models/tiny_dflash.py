"""Tiny DFlash heads, what their block makes written out once more, and folders of them."""

import json

import torch
from safetensors.torch import save_file
from torch.nn.functional import embedding, silu
from transformers import Qwen3Config

from outrider.models.heads.dflash import DFlash, DFlashConfig
from tiny import VOCAB
from tiny_heads import SIZES, norm

MASK, BLOCK = 31, 4


def dflash(
    kind=Qwen3Config,
    aux_layers=(1, 2),
    ids=None,
    lent=None,
    kind_of_head=DFlash,
    more=(),
    sights=(),
):
    """A random head of two layers; what `lent` has is a target's."""
    torch.manual_seed(0)
    layer = kind(**(SIZES | {"num_hidden_layers": 2}))
    size = VOCAB if ids is None else len(ids)
    own = {}
    if lent is not None:
        weight = lent.lm_head.weight if ids is None else lent.lm_head.weight[ids]
        own = {"embedding_VE": lent.model.embed_tokens.weight, "output_KE": weight}
    head = kind_of_head(
        DFlashConfig(layer, aux_layers, BLOCK, MASK, size, sights), *more, ids_K=ids, **own
    ).eval()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.15 * torch.randn_like(parameter))
    return head.requires_grad_(False)


def block_states(head, hidden, pending):
    """What the output layer reads, [block, E], behind a text whose states, but the pending token's,
    are `hidden`."""
    weights, count = head.state_dict(), len(hidden[0])
    context = norm(torch.cat(hidden, -1) @ weights["fc.weight"].T, weights["hidden_norm.weight"])
    x = embedding(torch.tensor([pending] + [MASK] * (BLOCK - 1)), weights["embed_tokens.weight"])
    at = torch.arange(count + BLOCK)
    angle = at[:, None] / 10000 ** (torch.arange(0, 8, 2) / 8)
    cos, sin = (torch.cat([f(angle)] * 2, -1) for f in (torch.cos, torch.sin))

    def turned(x):
        low, high = x.chunk(2, -1)
        few = slice(-x.shape[1], None)
        return x * cos[few] + torch.cat([-high, low], -1) * sin[few]

    for number in range(2):
        own = {
            name.split(".")[-2]: weight
            for name, weight in weights.items()
            if name.startswith(f"layers.{number}.")
        }
        given = norm(x, own["input_layernorm"])
        both = torch.cat([context, given])
        q, k, v = (
            (source @ own[f"{name}_proj"].T).view(len(source), -1, 8).transpose(0, 1)
            for name, source in (("q", given), ("k", both), ("v", both))
        )
        if "q_norm" in own:
            q, k = norm(q, own["q_norm"]), norm(k, own["k_norm"])
        q, k = turned(q), turned(k).repeat_interleave(2, 0)
        scores = q @ k.transpose(1, 2) / 8**0.5
        if head.config.sights:
            window, causal = head.config.sights[number]
            far = at[count:, None] - at
            hidden_there = (far < 0) & causal | (far.abs() >= (window or 1 << 30))
            scores = scores.masked_fill(hidden_there, -torch.inf)
        scores = scores.softmax(-1)
        y = (scores @ v.repeat_interleave(2, 0)).transpose(0, 1).reshape(BLOCK, -1)
        x = x + y @ own["o_proj"].T
        y = norm(x, own["post_attention_layernorm"])
        x = x + (silu(y @ own["gate_proj"].T) * (y @ own["up_proj"].T)) @ own["down_proj"].T
    return norm(x, weights["norm.weight"])


def written(folder, fields, head):
    (folder / "config.json").write_text(json.dumps(fields))
    weights = {name: weight.contiguous() for name, weight in head.state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    return folder
