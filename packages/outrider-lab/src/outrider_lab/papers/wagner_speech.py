"""Whisper in the protocol of Wagner et al.: recordings in, word error rates beside times.

The draft is another Whisper of the same vocabulary, with its own encoder or, as a decoder alone
(distil-whisper, a draft folder of outrider), on the target's states. A draft folder becomes a
decoder of transformers here, its restricted head a bias on the others' logits.
"""

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel, WhisperForCausalLM

from outrider.errors import AudioError, ConfigurationError, VocabularyMismatch
from outrider.models.config import is_speech
from outrider.models.layer_subset import LayerSubsetSource, is_folder
from outrider.models.pretrained import resolve_tokenizer
from outrider.models.sources import ModelSource
from outrider.shipped import WHISPER_DRAFT, shipped
from outrider.speech.audio import look
from outrider.speech.speech_model import WhisperModel, opened
from outrider.speech.transcriber import window_prompt
from outrider.speech.windows import frames
from outrider_lab.papers.score import word_errors
from outrider_lab.papers.wagner_pairs import WagnerPair, WagnerPrompt, weights
from outrider_lab.recordings import SpokenText

BOUND = 1e3  # the paper's alpha and beta for speech


def speech_pair(
    target: str,
    draft: str,
    recordings: Sequence[SpokenText],
    language: str | None,
    device: str,
    dtype: str = "float32",
) -> WagnerPair:
    """A Whisper with a draft on recordings of at most a window; longer ones are left out.

    Raises ConfigurationError for a model that is no Whisper, VocabularyMismatch for a draft with
    another vocabulary, AudioError if no recording is left.
    """
    source = ModelSource(target, "target")
    if not is_speech(source.config):
        raise ConfigurationError(
            f"recordings need a Whisper as the target; got {target!r}, a "
            f"{source.config.model_type}; give one, or --prompts instead"
        )
    if draft == WHISPER_DRAFT:
        draft = str(shipped(WHISPER_DRAFT))
    big = weights(source, device, dtype)
    tokenizer = resolve_tokenizer(target)
    hearing = opened(target, target, big, tokenizer)
    assert hearing is not None, "it is a Whisper"
    small = (
        decoder(LayerSubsetSource(source, draft), dtype, torch.device(device))
        if is_folder(draft)
        else weights(ModelSource(draft, "draft"), device, dtype)
    )
    # Whisper's own `generate` cannot go on where all of a draft was accepted
    small.generate = MethodType(GenerationMixin.generate, small)
    if small.config.vocab_size != big.config.vocab_size:
        raise VocabularyMismatch(
            f"draft and target need one vocabulary; got {small.config.vocab_size} and "
            f"{big.config.vocab_size} tokens; take a multilingual draft for a multilingual target"
        )
    code = hearing.vocabulary.language("en" if language is None else language, target)
    both = [(one, made) for one in recordings if (made := _prompt(hearing, one, code)) is not None]
    if not both:
        raise AudioError(
            f"no recording fits into a window of {hearing.seconds(hearing.frames):g} s; got "
            f"{len(recordings)} longer ones; cut them at pauses"
        )
    left_out = len(recordings) - len(both)
    return WagnerPair(
        f"{target} with {draft}" + (f" ({left_out} recordings too long)" if left_out else ""),
        big, small, [made for _, made in both], hearing.text, word_errors(code),
        hearing.context // 2, BOUND, tuple(one for one, _ in both),
    )  # fmt: skip


def _prompt(hearing: WhisperModel, spoken: SpokenText, language: str | None) -> WagnerPrompt | None:
    """The frames of a recording and what its text begins with; None if it is too long."""
    recording = look(spoken.file, 0, None, hearing.rate)
    if recording.seconds > hearing.seconds(hearing.frames):
        return None
    sound = frames(hearing.extractor, recording.read(hearing.rate))
    model = hearing.model
    features = sound.window(0, hearing.frames)[None].to(model.device, model.dtype)
    ids, _ = window_prompt(hearing.vocabulary, language, "transcribe", timestamps=False)
    arguments: dict[str, Any] = {
        "input_features": features,
        "decoder_input_ids": torch.tensor([ids], device=model.device),
    }
    return WagnerPrompt(arguments, len(ids), spoken.text)


def decoder(source: LayerSubsetSource, dtype: str, device: torch.device) -> PreTrainedModel:
    """A shallow draft as a decoder on the target's states; a restricted head says no by a bias."""
    layers = source.model(dtype, device)
    config = copy.deepcopy(layers.config)
    config.is_encoder_decoder = False
    with torch.device("meta"):
        draft = WhisperForCausalLM(config).eval()
    draft.model.decoder = layers.get_decoder()
    head = layers.get_output_embeddings().weight
    limited = torch.nn.Linear(head.shape[1], head.shape[0], device=device, dtype=head.dtype)
    limited.weight = head
    with torch.no_grad():
        lowest = 0.0 if source.ids_K is None else torch.finfo(head.dtype).min
        limited.bias.fill_(lowest)
        if source.ids_K is not None:
            limited.bias[source.ids_K.to(device)] = 0.0
    draft.proj_out = limited
    draft.generation_config = copy.deepcopy(layers.generation_config)
    return draft
