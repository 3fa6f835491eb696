"""Embeddings of n-grams by their hash, and a convolution with gaps over them: Qwen4-Exp.

A token is hashed with those before it in its own text, which is a window of token ids. transformers
keeps these ids and the convolution's inputs as two more states of its cache; both forwards are
replaced.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.models.recurrent.hooks import Function, handle_of
from outrider.models.recurrent.short_conv import over_windows

_CONVOLUTION, _IDS = 1, 2  #: numbers of the states, as transformers' own


def wrap_embedding(theirs: Function) -> Function:
    """`Qwen4ExpTextNGramEmbedding.forward` over nodes, if it is given a cache of ours."""

    def forward(self: Any, input_ids: Tensor, past_key_values: object) -> object:
        handle = handle_of(past_key_values, self)
        if handle is None:
            return theirs(self, input_ids, past_key_values)
        # one more than the id, so that 0 says that there is no token
        windows = handle[:, _IDS].windows(input_ids.long()[:, None] + 1, self.ngram_size)[:, 0]
        ids_BQN = torch.where(windows > 0, windows - 1, self.eos_token_id).flip(-1)
        mixed = ids_BQN[..., 0] * self.layer_multipliers[0]
        text, found = torch.ones_like(mixed, dtype=torch.bool), []
        for back in range(1, self.ngram_size):  # no n-gram reaches across the end of a text
            text = text & (ids_BQN[..., back] != self.eos_token_id)
            token = torch.where(text, ids_BQN[..., back], self.eos_token_id)
            mixed = torch.bitwise_xor(mixed, token * self.layer_multipliers[back])
            some = slice((back - 1) * self.heads_per_ngram, back * self.heads_per_ngram)
            hashed = torch.remainder(mixed[..., None], self.ngram_heads_vocab_sizes[some])
            found.append(hashed + self.ngram_heads_offsets[some])
        return self.ngram_embedding(torch.cat(found, -1)).flatten(-2)

    return forward


def wrap_layer(theirs: Function) -> Function:
    """`Qwen4ExpTextPLELayer.forward` over nodes, if it is given a cache of ours."""

    def forward(
        self: Any,
        hidden_states: Tensor,
        input_ids: Tensor,
        past_key_values: object,
        conv_mask: object = None,
    ) -> object:
        handle = handle_of(past_key_values, self)
        if handle is None:
            return theirs(self, hidden_states, input_ids, past_key_values, conv_mask=conv_mask)
        streams = (self.hc_count, self.hidden_size)
        embedded = self.ple_embedding(input_ids, past_key_values)
        key = self.norm_key(self.key_proj(embedded)).unflatten(-1, streams)
        query = self.norm_query(hidden_states).unflatten(-1, streams)
        gate = (key * query).sum(-1, keepdim=True) / self.hidden_size**0.5
        gate = torch.sigmoid(gate.abs().clamp_min(1e-6).sqrt() * gate.sign())
        gated = (gate * self.value_proj(embedded)[:, :, None]).flatten(-2)
        reach, gap = self.short_conv_state_len + 1, self.conv1d.dilation[0]
        windows = handle[:, _CONVOLUTION].windows(self.norm_conv(gated).mT, reach)[..., ::gap]
        return gated + over_windows(windows, self.conv1d.weight[:, 0], None, "silu").mT

    return forward


WRAPPERS: Mapping[str, Function] = {
    "Qwen4ExpTextNGramEmbedding": wrap_embedding,
    "Qwen4ExpTextPLELayer": wrap_layer,
}
