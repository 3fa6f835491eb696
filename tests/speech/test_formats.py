"""Transcripts as files, byte for byte; captions read back; a reference followed."""

import json

import pytest

from outrider.errors import ConfigurationError, UnknownName
from outrider.speech import captions
from outrider.speech.captions import ReferenceAligner
from outrider.speech.formats import FORMATS, clock, written
from outrider.speech.result import Segment, Transcript, TranscriptStats, Word, whole_text


def segment(text, start, end, words=None):
    return Segment(text, start, end, (1, 2), 0.0, -0.25, 1.5, 0.125, 0, 0, 0, words)


def transcript(*segments):
    text = whole_text(segments)
    return Transcript(text, "en", segments, 61.5, TranscriptStats(windows=3), {}, "talk.wav")


TALK = transcript(
    segment(" Tom & <Jerry>", 0.0, 1.5), segment("  ", 1.5, 2.0), segment(" Fine, äh.", 2.0, 61.48)
)
WORDS = transcript(
    segment(
        " Hello there", 1.0, 2.5, (Word(" Hello", 1.0, 1.75, 0.5), Word(" there", 1.75, 2.5, 1.0))
    )
)

EXPECTED = {
    "txt": "Tom & <Jerry>\nFine, äh.\n",
    "srt": "1\n00:00:00,000 --> 00:00:01,500\nTom & <Jerry>\n\n"
    "2\n00:00:02,000 --> 00:01:01,480\nFine, äh.\n\n",
    "vtt": "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nTom &amp; &lt;Jerry&gt;\n\n"
    "00:00:02.000 --> 00:01:01.480\nFine, äh.\n\n",
    "tsv": "start\tend\ttext\n0\t1500\tTom & <Jerry>\n2000\t61480\tFine, äh.\n",
}


@pytest.mark.parametrize("kind", list(EXPECTED))
def test_the_bytes_of_every_format(kind):
    assert written(TALK, kind) == EXPECTED[kind]


def test_json_has_everything_but_what_changes_between_runs():
    document = json.loads(written(WORDS, "json"))
    assert document["segments"][0]["words"][0] == {
        "word": " Hello",
        "start": 1.0,
        "end": 1.75,
        "probability": 0.5,
    }
    assert set(document) == {"text", "language", "duration", "segments"}
    slower = transcript(*WORDS.segments)
    slower.stats.encoder_ms = 1e6
    assert written(slower, "json") == written(WORDS, "json")


def test_words_are_cues_of_their_own():
    assert written(WORDS, "srt").count("-->") == 2
    assert "00:00:01,750 --> 00:00:02,500\nthere" in written(WORDS, "srt")


@pytest.mark.parametrize(
    ("segments", "times"),
    [
        ([(0, 2, 3.9), (2.5, 3, 3)], ["0 --> 2.5", "2.5 --> 3"]),  # a window's last word
        ([(59, 60, 66)], ["59 --> 61.5"]),  # the recording ends at 61.5
        ([(62, 64, 64)], ["62 --> 64"]),  # all of it is behind the end: as the model says
        ([(4, 5, 5), (4, 6, 6)], ["4 --> 5", "4 --> 6"]),  # begin at once: both stay
        ([(0, 1, 1), (1, 2, 2)], ["0 --> 1", "1 --> 2"]),
    ],
)
def test_captions_end_with_the_recording_and_where_the_next_begins(segments, times):
    """The model's own times are in the document of JSON."""
    said = [segment(" x", at, end, (Word(" x", at, last, 1.0),)) for at, end, last in segments]
    rows = written(transcript(*said), "tsv").splitlines()[1:]
    shown = [row.split("\t")[:2] for row in rows]
    assert [f"{int(at) / 1000:g} --> {int(end) / 1000:g}" for at, end in shown] == times
    kept = json.loads(written(transcript(*said), "json"))["segments"]
    assert [each["words"][0]["end"] for each in kept] == [last for _, _, last in segments]


def test_unknown_formats_are_named():
    with pytest.raises(UnknownName, match="unknown format 'doc'"):
        written(TALK, "doc")
    assert list(FORMATS) == ["txt", "srt", "vtt", "tsv", "json"]
    assert clock(-1.0, ".") == "00:00:00.000"


@pytest.mark.parametrize("kind", ["srt", "vtt", "json", "tsv"])
def test_captions_are_read_back(tmp_path, kind):
    path = tmp_path / f"talk.{kind}"
    path.write_text(written(TALK, kind), "utf-8")
    for given in (path, str(path), path.read_text("utf-8"), TALK):
        lines = captions.read(given)
        assert [line.text.strip() for line in lines] in (
            ["Tom & <Jerry>", "Fine, äh."],
            ["Tom &", "Fine, äh."],  # SubRip has markup and no way to write it out
        )
        assert lines[1].start == 2.0
        assert lines[1].end == 61.48


def test_pipelines_and_plain_texts_are_references():
    chunks = {"text": "a b", "chunks": [{"text": " a", "timestamp": (0.0, 1.0)}]}
    assert captions.read(chunks) == [captions.CaptionLine(" a", 0.0, 1.0)]
    assert captions.read({"text": "one\ntwo"}) == [
        captions.CaptionLine("one"),
        captions.CaptionLine("two"),
    ]
    assert captions.read("just words") == [captions.CaptionLine("just words")]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.srt", "cannot read the reference"),
        ("  \n ", "says nothing"),
        ({"segments": [{"start": 1}]}, "segments of the reference"),
        (5, "reference must be"),
    ],
)
def test_references_that_are_none(given, message):
    with pytest.raises(ConfigurationError, match=message):
        captions.read(given)


def test_a_reference_with_times_is_cut_by_them():
    script = ReferenceAligner(captions.read(TALK), lambda text: [text], 61.5)
    assert script.tokens(0.0, 1.8, True) == [" Tom & <Jerry>"]
    assert script.tokens(1.8, 30.0, True) == [" Fine, äh."]
    assert script.tokens(61.49, 70.0, True) == []


def test_a_plain_reference_is_followed_by_what_is_said():
    words = " ".join(f"word{n}" for n in range(100))
    script = ReferenceAligner([captions.CaptionLine(words)], lambda text: text.split(), 10.0)
    assert script.tokens(0.0, 1.0, True)[0] == "word0"
    script.follow("Word0 word1, something word3 else")
    assert script.tokens(1.0, 2.0, True)[0] == "word5"
    script.follow("nothing of the kind")
    assert script.tokens(1.0, 2.0, True)[0] == "word5"
    assert script.tokens(8.0, 9.0, False)[0] == "word50"  # about there, with room for doubt
