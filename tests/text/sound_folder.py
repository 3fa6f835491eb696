"""A folder of a tiny Qwen2-Audio with its processor, as on the hub, and recordings."""

import io
import wave

import media_models as tiny_models
import numpy as np
from image_folder import words
from transformers import Qwen2AudioProcessor, WhisperFeatureExtractor

RATE = 16_000
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }} {% else %}"
    "{% for p in m.content %}{% if p.type == 'audio' %}"
    "<image> {% else %}{{ p.text }} {% endif %}{% endfor %}{% endif %}{% endfor %}[assistant] "
)


def processor():
    """A processor with a chat template that hears one second: 32 frames of 8 mels."""
    hears = WhisperFeatureExtractor(feature_size=8, hop_length=500, chunk_length=1, n_fft=1000)
    return Qwen2AudioProcessor(hears, words(), TEMPLATE, audio_token="<image>")


def saved(place):
    """The folder of that path, with a model in it."""
    tiny_models.made("qwen2_audio").save_pretrained(place)
    processor().save_pretrained(place)
    return place


def samples(seed, seconds=0.8):
    """Noise whose loudness goes up and down."""
    count = round(seconds * RATE)
    noise = np.random.default_rng(seed).uniform(-0.5, 0.5, count)
    return (noise * np.sin(np.arange(count) * (seed + 1) / 2000)).astype(np.float32)


def wav(sound):
    """A WAV file of 16 bits."""
    held = io.BytesIO()
    with wave.open(held, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    return held.getvalue()
