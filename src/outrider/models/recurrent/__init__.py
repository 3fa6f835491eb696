"""Layers that keep a state: exact over trees by a log of what each node adds, not by its states.

A state layer takes a token by an update of its state. Of the text that is settled a row has the
state; of every node behind it, by slot as keys and values, what the update was made of
(`states.RecurrentStates`). So a rejected node is forgotten by being written over, an accepted path
moves next to its root, and what is settled is applied to the state before the next call.

The mixers stay transformers' own: they ask the cache for their state, are given a handle, and hand
it to functions of their modelling file, which stand behind wrappers that know handles (`hooks`).
A kind of mixer is one file here and one line in `MIXERS`.
"""

from collections.abc import Mapping

#: Files of this package by the function of a modelling file that they stand before.
MIXERS: Mapping[str, str] = {
    "causal_conv1d_fn": "short_conv",
    "causal_conv1d_update": "short_conv",
}

#: Types of transformers' models whose mixers call these functions, and nothing else of that kind.
FAMILIES = frozenset({"lfm2", "lfm2_moe", "lfm3"})

#: Types of layers that keep a state and take no mask.
LAYERS = frozenset({"conv"})
