"""Recordings written down by encoder-decoders that hear them as their source."""

import numpy as np
import pytest
import sound_folder
import torch
import transformers
from image_folder import words
from seq2seq_families import FAMILIES, build
from tiny_media import VOCAB

import outrider
from outrider import ConfigurationError, StopConditions
from outrider.costs import Costs
from outrider.models.config import decoder_of

NEW = 8
#: What stands in for the special words of a prompt of Canary
TEMPLATE = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}"
    "w20 w{{ p.source_language | length }} w21{% endif %}{% endfor %}{% endfor %}"
)


def moonshine():
    hears = transformers.Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    return transformers.Wav2Vec2Processor(hears, words("<image>", 50))


def extractor(kind):
    """What hears for a type: with transformers 5.17 it needs a package that ours do not."""
    try:
        return kind(feature_size=16, hop_length=160)
    except ImportError as error:
        if "librosa" not in str(error):
            raise
        pytest.skip(f"transformers {transformers.__version__} wants librosa for {kind.__name__}")


def canary():
    hears = extractor(transformers.ParakeetFeatureExtractor)
    return transformers.CanaryProcessor(hears, words("<image>", 50), chat_template=TEMPLATE)


def opened(place, name, processor, start=1):
    """The model of a folder, with drafts that copy, and as transformers has it."""
    config = FAMILIES[name]()
    for part in (config, decoder_of(config)):
        part.vocab_size = VOCAB  # the tokenizer's
    model = build(config, seed=3)
    for part, weight in model.named_parameters():
        if "encoder_attn" in part and weight.dim() > 1:
            weight.data.mul_(4.0)  # so that a text depends on its source
    model.generation_config.eos_token_id = None
    model.generation_config.decoder_start_token_id = start
    model.save_pretrained(place)
    processor.save_pretrained(place)
    loaded = outrider.load(
        str(place),
        drafter="prompt_lookup",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
    )
    return loaded, model


@torch.inference_mode()
def generated(model, begun, **given):
    """What transformers writes of one recording."""
    found = model.generate(
        **given,
        decoder_input_ids=torch.tensor([begun]),
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
    )
    return tuple(found[0, -NEW:].tolist())


def texts(result):
    return [segment.tokens for segment in result.segments]


def test_moonshine_writes_recordings_down(tmp_path):
    processor = moonshine()
    loaded, model = opened(tmp_path, "Moonshine", processor)
    sounds = [sound_folder.samples(1), sound_folder.samples(2, 0.5)]
    right = [[generated(model, [1], input_values=torch.tensor(sound[None]))] for sound in sounds]
    assert right[0] != right[1]
    found = loaded.transcribe(sounds, max_new_tokens=NEW)
    assert [texts(one) for one in found] == right
    assert (
        found[0].text.split()
        == loaded.tokenizer.decode(right[0][0], skip_special_tokens=True).split()
    )
    long = np.concatenate([sounds[0], np.zeros(40 * 16_000, np.float32), sounds[1]])
    spans = [(one.start, one.end) for one in loaded.transcribe(long, max_new_tokens=4).segments]
    assert len(spans) > 1
    assert max(end - start for start, end in spans) <= 30
    with pytest.raises(ConfigurationError, match="is not told the language"):
        loaded.transcribe(sounds[0], language="en")
    with pytest.raises(ConfigurationError, match="told nothing ahead"):
        loaded.transcribe(sounds[0], initial_prompt="w20")


def test_kyutai_writes_as_many_tokens_as_a_recording_has_moments(tmp_path):
    hears = transformers.KyutaiSpeechToTextFeatureExtractor(
        sampling_rate=sound_folder.RATE, audio_delay_seconds=0.0, audio_silence_prefix_seconds=0.0
    )
    processor = transformers.KyutaiSpeechToTextProcessor(hears, words("<image>", 50))
    loaded, model = opened(tmp_path, "Kyutai STT", processor)
    sound = sound_folder.samples(1)
    values = hears(sound, sampling_rate=sound_folder.RATE, return_tensors="pt")["input_values"]
    asked = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
    with torch.inference_mode():
        right = model.generate(input_ids=torch.tensor([[1]]), input_values=values, **asked)
    assert texts(loaded.transcribe(sound, max_new_tokens=NEW)) == [tuple(right[0, 1:].tolist())]
    prompts, moments = loaded.sound_prompts, values.shape[-1] // model.config.frame_size
    _, source = prompts.asked(sound, None, None)
    for most, end in ((moments + 9, moments), (NEW, NEW)):
        assert prompts.within(StopConditions(most), source).max_new_tokens == end


def test_cohere_is_told_the_language(tmp_path):
    named = "startofcontext startoftranscript emo:undefined en pnc noitn notimestamp nodiarize"
    named = ["▁", *(f"<|{word}|>" for word in named.split())]
    tokenizer = words("<image>", 50, **{f"word{at}_token": word for at, word in enumerate(named)})
    hears = extractor(transformers.CohereAsrFeatureExtractor)
    processor = transformers.CohereAsrProcessor(hears, tokenizer)
    loaded, model = opened(tmp_path, "Cohere ASR", processor)
    sound = sound_folder.samples(1)
    made = processor(sound, language="en", sampling_rate=sound_folder.RATE)
    begun = made.pop("decoder_input_ids")[0].tolist()
    assert len(begun) == 10
    assert tokenizer.unk_token_id not in begun
    seen = made["attention_mask"].sum()
    right = generated(model, begun, input_features=made["input_features"][:, :seen])
    assert texts(loaded.transcribe(sound, language="en", max_new_tokens=NEW)) == [right]


def test_seamless_begins_with_the_token_of_a_language(tmp_path):
    hears = transformers.SeamlessM4TFeatureExtractor(num_mel_bins=8, feature_size=8, stride=2)
    tokenizer = words("<image>", 50, word5_token="__eng__")
    processor = transformers.Wav2Vec2Processor(hears, tokenizer)  # its own wants SentencePiece's
    loaded, model = opened(tmp_path, "SeamlessM4T (speech)", processor, start=2)
    loaded.tokenizer.tgt_lang = "eng"  # as SeamlessM4T's has it
    sound = sound_folder.samples(1)
    made = hears(sound, sampling_rate=sound_folder.RATE, return_tensors="pt")
    features = made["input_features"][:, : made["attention_mask"].sum()]
    begun = [loaded.opening.start, tokenizer.convert_tokens_to_ids("__eng__")]
    right = generated(model, begun, input_features=features)
    assert texts(loaded.transcribe(sound, language="eng", max_new_tokens=NEW)) == [right]
    with pytest.raises(ConfigurationError, match="has to be told the language"):
        loaded.transcribe(sound)
    with pytest.raises(ConfigurationError, match="no token __zzz__"):
        loaded.transcribe(sound, language="zzz")


def test_canary_is_told_the_language(tmp_path):
    processor = canary()
    loaded, model = opened(tmp_path, "Canary", processor)
    sound = sound_folder.samples(1)
    made = processor.apply_transcription_request(audio=sound, source_language="en")
    begun = made.pop("decoder_input_ids")[0].tolist()
    assert len(begun) == 3
    right = generated(model, begun, **made)
    assert texts(loaded.transcribe(sound, language="en", max_new_tokens=NEW)) == [right]
    with pytest.raises(ConfigurationError, match="has to be told the language"):
        loaded.transcribe(sound)
