"""Recorded speech through OpenAI's client: Whisper tiny.en and base, served.

The folders `whisper-tiny.en`, `whisper-base` and `speech` of OUTRIDER_MODELS.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from served import NAME, serving

import outrider

pytestmark = pytest.mark.real

PROMPT = "usr/share/asterisk/sounds/en_US_f_Allison/privacy-prompt.wav"


@pytest.fixture(scope="module")
def recording(models_directory):
    path = models_directory / "speech" / PROMPT
    if not path.is_file():
        pytest.skip(f"needs the recording {path}")
    return path


@pytest.mark.parametrize("name", ["whisper-tiny.en", "whisper-base"])
def test_a_recording_becomes_the_librarys_transcript(models_directory, recording, name):
    folder = models_directory / name
    if not folder.is_dir():
        pytest.skip(f"needs {name} in the directory of models")
    speculator = outrider.load(folder, drafter="none", dtype="float32", threads=1)
    expected = speculator.transcribe(recording, language="en")
    with serving(speculator) as server:
        client = server.client()

        def ask(**options):
            with recording.open("rb") as file:
                return client.audio.transcriptions.create(
                    file=file, model=NAME, language="en", **options
                )

        with ThreadPoolExecutor(3) as pool:
            together = [pool.submit(ask) for _ in range(3)]
            texts = [one.result().text for one in together]
        assert texts == [expected.text] * 3
        words = ask(response_format="verbose_json", timestamp_granularities=["word", "segment"])
        assert words.text == expected.text
        assert " ".join(word.word for word in words.words) == " ".join(expected.text.split())
        starts = [word.start for word in words.words]
        assert starts == sorted(starts)
        events = list(ask(stream=True))
        assert events[-1].text == expected.text
    assert "phone" in expected.text.lower() or "name" in expected.text.lower()
