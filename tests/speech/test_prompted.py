"""Recordings heard by an audio language model: library, command line, server."""

import json
import sys

import numpy as np
import openai
import pytest
import sound_folder
from served import NAME, far, serving

import outrider
from outrider import ConfigurationError, SamplingParams, Stop, cli
from outrider.costs import Costs
from outrider.speech import vad
from outrider.text.sound_prompts import INSTRUCTION

HOW = {"max_new_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("hears")
    sound_folder.saved(place)
    (place / "talk.wav").write_bytes(sound_folder.wav(sound_folder.samples(5, 3.3)))
    return place


@pytest.fixture(scope="module")
def model(folder):
    return outrider.load(
        str(folder),
        drafter="prompt_lookup",
        dtype="float32",
        threads=1,
        pack_weights=False,
        device="cpu",
        step_costs=Costs.of({1: 1.0, 2: 1.1, 8: 1.5}),
    )


def recording(seed, pieces):
    """Noise in which every other piece is silence: somewhere to cut."""
    loud = [sound_folder.samples(seed + at, 0.4) for at in range(pieces)]
    return np.concatenate([one for piece in loud for one in (piece, np.zeros(4800, np.float32))])


def by_hand(model, samples, text=INSTRUCTION):
    """Each window as a question of a chat."""
    rate, texts = sound_folder.RATE, []
    for start, end in vad.at_pauses(samples, rate, 1.0):
        cut = samples[int(start * rate) : int(end * rate)]
        parts = [{"type": "audio", "audio": cut}, {"type": "text", "text": text}]
        asked = [{"role": "user", "content": parts}]
        texts.append(model.plain().generate(asked, SamplingParams(0), Stop(6)).texts[0].strip())
    return texts


def test_a_long_recording_is_heard_by_windows_cut_at_pauses(model):
    sound = recording(1, 6)
    right = by_hand(model, sound)
    assert len(right) > 4
    heard = model.transcribe(sound, **HOW)
    assert [one.text.strip() for one in heard.segments] == right
    assert heard.text == " ".join(right)
    ends = [one.end for one in heard.segments]
    assert [0.0, *ends[:-1]] == [one.start for one in heard.segments]
    assert heard.duration == pytest.approx(ends[-1])
    assert heard.settings["windows"] == "pauses"
    assert heard.stats.decoded.new_tokens == 6 * len(right)


def test_windows_and_recordings_side_by_side_say_what_each_says_alone(model):
    sounds = [recording(1, 5), recording(7, 2), sound_folder.samples(3, 0.3)]
    for how in (HOW, HOW | {"temperature": 0.9, "seed": 4}):
        together = model.transcribe(sounds, **how)
        alone = [model.plain().transcribe(one, batch_size=1, **how) for one in sounds]
        assert [one.text for one in together] == [one.text for one in alone]
    assert together[0].text != model.transcribe(sounds[0], **HOW).text


def test_what_is_asked_may_be_said_otherwise_and_in_a_language(model):
    sound = recording(2, 2)
    plain = model.transcribe(sound, **HOW).text
    told = model.transcribe(sound, initial_prompt="w20 w21", **HOW)
    assert [one.text.strip() for one in told.segments] == by_hand(model, sound, "w20 w21")
    french = model.transcribe(sound, language="fr", initial_prompt="w20", **HOW)
    right = by_hand(model, sound, "w20 It is in french.")
    assert [one.text.strip() for one in french.segments] == right
    assert french.language == "fr"
    assert plain != told.text


def test_speech_alone_is_heard_where_somebody_says_where_it_is(model):
    sound = recording(2, 3)
    heard = model.transcribe(sound, vad=[(0.7, 1.1)], **HOW)
    assert [(one.start, one.end) for one in heard.segments] == [(0.7, 1.1)]


@pytest.mark.parametrize(
    "option",
    [
        {"task": "translate"},
        {"word_timestamps": True},
        {"beam_size": 2},
        {"best_of": 2},
        {"reference": "text"},
        {"suppress_tokens": [5]},
        {"condition_on_previous_text": True},
        {"initial_prompt": [5, 6]},
    ],
)
def test_what_a_whisper_alone_has_is_refused(model, option):
    with pytest.raises(ConfigurationError, match="a Whisper model alone"):
        model.transcribe(recording(1, 1), **{**HOW, **option})


def test_a_broken_recording_does_not_end_the_others(model, folder):
    broken = folder / "broken.wav"
    broken.write_bytes(sound_folder.wav(np.zeros(10, np.float32)))
    running = model.transcribe_stream([str(broken), recording(1, 1)], **HOW)
    broken.write_bytes(b"RIFF")
    running.drain()
    assert list(running.errors) == [0]
    assert running.transcripts[1].text == model.transcribe(recording(1, 1), **HOW).text


def test_the_command_line_transcribes(folder, model, monkeypatch, capsys):
    words = ["transcribe", folder / "talk.wav", "-m", folder, "--dtype", "float32"]
    words += ["--threads", 1, "-t", 0, "--batch-size", 4]
    monkeypatch.setattr(sys, "argv", ["outrider", *map(str, words)])
    cli.main()
    out = capsys.readouterr().out
    heard = model.transcribe(str(folder / "talk.wav"), temperature=0)
    assert len(heard.segments) == 4
    assert out.split() == heard.text.split()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--task", "translate"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "a Whisper model alone has" in capsys.readouterr().err


@pytest.mark.one_in(2)
@pytest.mark.parametrize("behind", ["thread", "pipe"])
def test_a_server_transcribes_beside_its_chats(model, behind):
    sound = recording(4, 3)
    right = model.transcribe(sound, temperature=0, batch_size=2)
    made = serving if behind == "thread" else far
    with made(model, max_model_len=600) as running:
        client = running.client()
        asked = {"model": NAME, "file": ("a.wav", sound_folder.wav(sound))}
        first = client.audio.transcriptions.create(**asked)
        library = model.transcribe(
            {"array": np.round(sound * 32767) / 32768, "sampling_rate": 16000}, temperature=0
        )
        assert len(first.text.split()) == len(library.text.split()) == len(right.text.split())
        whole = client.audio.transcriptions.create(response_format="verbose_json", **asked)
        assert whole.text == first.text
        assert len(whole.segments) == len(right.segments)
        events = list(client.audio.transcriptions.create(stream=True, **asked))
        assert events[-1].text == first.text
        assert "".join(one.delta for one in events[:-1]).strip() == first.text
        chat = [{"role": "user", "content": "w20"}]
        assert client.chat.completions.create(model=NAME, messages=chat, max_tokens=4).choices
        with pytest.raises(openai.BadRequestError, match="a Whisper model alone"):
            client.audio.transcriptions.create(
                response_format="verbose_json", timestamp_granularities=["word"], **asked
            )
        with pytest.raises(openai.BadRequestError, match="the recording"):
            client.audio.transcriptions.create(**asked | {"file": ("a.wav", b"RIFF")})
        again = client.audio.transcriptions.create(**asked)
        assert json.loads(again.model_dump_json())["text"] == first.text
