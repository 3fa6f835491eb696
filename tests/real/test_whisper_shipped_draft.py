"""Whisper base with its shipped draft on a reader's recordings: the text is plain decoding's, and
steps are saved.

The folders `whisper-base` and `speech` of OUTRIDER_MODELS; the latter holds Debian's
`pocketsphinx-testdata`, unpacked. A minute on one core.
"""

import pytest

import outrider
from outrider.models.cpu_kernels import build

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def recordings(models_directory):
    found = sorted((models_directory / "speech").rglob("librivox/*.wav"))
    if not found:
        pytest.skip(f"needs pocketsphinx-testdata unpacked in {models_directory / 'speech'}")
    return [str(file) for file in found]


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8 draft", "int8"])
def speculator(whisper, request):
    how = {"dtype": request.param, "draft_dtype": "target"}
    if "int8" in request.param:
        if build.unbuilt():
            pytest.skip(f"no kernels: {build.unbuilt()}")
        # the draft alone, as its folder says, beside a target in bfloat16; or all
        how = {"dtype": "bfloat16" if "draft" in request.param else "int8"}
    draft = "whisper-base-draft"
    return outrider.load(whisper, draft=draft, threads=1, pack_weights=True, planner="fixed", **how)


@pytest.mark.parametrize("timestamps", ["none", "segment"])
def test_texts_are_plain_decodings_in_fewer_steps(speculator, recordings, timestamps):
    asked = {"language": "en", "temperature": 0, "timestamps": timestamps}
    drafted = speculator.transcribe(recordings, **asked)
    plain = speculator.plain().transcribe(recordings, **asked)
    assert [one.text for one in drafted] == [one.text for one in plain]
    assert "rather cold-hearted and rather selfish" in drafted[2].text
    tokens = sum(one.stats.decoded.new_tokens for one in drafted)
    assert tokens / sum(one.stats.decoded.steps for one in drafted) > 1.8
    assert tokens / sum(one.stats.decoded.steps for one in plain) <= 1
