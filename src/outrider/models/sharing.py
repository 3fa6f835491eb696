"""Encoders that two models have in common: one runs, both decoders attend to its states."""

import torch
from transformers import PreTrainedModel


def same_encoder(target: PreTrainedModel, draft: PreTrainedModel) -> bool:
    """Whether the encoders are of one class with equal weights, bit by bit."""
    mine, theirs = target.get_encoder(), draft.get_encoder()
    if type(mine) is not type(theirs):
        return False
    ours, others = mine.state_dict(), theirs.state_dict()
    if {name: t.shape for name, t in ours.items()} != {name: t.shape for name, t in others.items()}:
        return False
    return all(torch.equal(weight, others[name]) for name, weight in ours.items())
