"""Speech2Text takes a mask of frames and works out which states are there by itself."""

import torch
from torch import Tensor

from outrider.models.seq2seq.runner import Seq2SeqRunner


class SpeechToTextRunner(Seq2SeqRunner):
    """Speech2Text: states are said in frames, of which each convolution leaves every second."""

    def given(self, states: Tensor, seen: Tensor | None) -> dict[str, object]:
        """As many frames as make the states that are there."""
        source = super().given(states, None)
        if seen is not None:
            there = (seen[:, 0, 0] == 0 if seen.dim() == 4 else seen).sum(1)
            leaves = 2 ** int(self.model.config.num_conv_layers)
            steps = torch.arange((states.shape[1] - 1) * leaves + 1, device=seen.device)
            source["attention_mask"] = (steps <= (there[:, None] - 1) * leaves).long()
        return source
