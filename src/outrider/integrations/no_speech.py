"""Whisper's test for silence, which transformers keeps in a logits processor.

`WhisperNoSpeechDetection` changes no score. At the first token it notes how probable it is that
nobody speaks, for the thresholds of Whisper's `generate`. It is asked once, about the prompts, and
takes no part in decoding.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import generation as hf
from transformers.generation.logits_process import WhisperNoSpeechDetection


def listened(
    model: PreTrainedModel,
    processors: Sequence[hf.LogitsProcessor],
    input_ids: Tensor,
    model_kwargs: Mapping[str, object],
    beams: int = 1,
) -> list[hf.LogitsProcessor]:
    """The processors without the test for silence, which has its answer.

    `input_ids` have one row for each prompt, whatever the `beams`.
    """
    others = [p for p in processors if not isinstance(p, WhisperNoSpeechDetection)]
    for at, processor in enumerate(processors):
        if isinstance(processor, WhisperNoSpeechDetection):
            with torch.no_grad():
                _ask(processor, model, processors[:at], input_ids, model_kwargs, beams)
    return others


def _ask(
    processor: WhisperNoSpeechDetection,
    model: PreTrainedModel,
    ahead: Sequence[hf.LogitsProcessor],
    input_ids: Tensor,
    model_kwargs: Mapping[str, object],
    beams: int,
) -> None:
    """Call it as plain decoding does at its first token, on states that are there already."""
    encoded, inputs = model_kwargs["encoder_outputs"], processor.inputs
    if processor.start_of_trans_offset > 1 and inputs is not None:  # it runs the model itself
        scores = torch.zeros(len(input_ids), model.config.vocab_size)
        if len(inputs["decoder_input_ids"]) == len(input_ids):
            processor.inputs = {
                **{name: inputs[name] for name in inputs if name.startswith("decoder_")},
                "encoder_outputs": encoded,
            }
        try:
            processor(input_ids, scores)
        finally:
            processor.inputs = inputs
        return
    asked = model.prepare_inputs_for_generation(
        input_ids,
        decoder_attention_mask=model_kwargs.get("decoder_attention_mask"),
        encoder_outputs=encoded,
    )
    scores = model(**asked).logits[:, -1].float()
    if beams > 1:  # a beam search shows it log-probabilities, and a row for each beam
        scores = torch.log_softmax(scores, -1).repeat_interleave(beams, 0)
        input_ids = input_ids.repeat_interleave(beams, 0)
    for earlier in ahead:
        scores = earlier(input_ids, scores)
    processor(input_ids, scores)
