"""The page of supported models says what the tests check, and has looked at every type."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import supported_models
import supported_speech
import transformers
from packaging import version
from supported_models import sweep

sys.path.append(str(Path(sweep.__file__).parent))
import speech_types

SCRIPT = Path(sweep.__file__).parent / "sweep.py"


WRITTEN_WITH = sweep.read_record()[1]


@pytest.mark.skipif(
    version.parse(transformers.__version__) < version.parse(WRITTEN_WITH),
    reason=f"the page has the types of transformers {WRITTEN_WITH}, some of which are missing here",
)
def test_the_page_is_current():
    assert supported_models.PAGE.read_text(encoding="utf-8") == supported_models.document(), (
        "run: python tests/models/supported_models.py"
    )


def test_somebody_has_looked_at_every_type_of_transformers():
    record, _ = sweep.read_record()
    new = {*sweep.causal(), *sweep.others()} - record.keys()
    assert not new, f"run: python benchmarks/model_types/sweep.py --types {' '.join(sorted(new))}"


def test_somebody_has_looked_at_every_image_text_type_with_pictures():
    record, _ = sweep.read_record()
    new = [kind for kind in sweep.image_text() if "images" not in record.get(kind, {})]
    assert not new, f"run: python benchmarks/model_types/sweep.py --types {' '.join(new)}"
    silent = [
        kind
        for kind in sweep.image_text()
        if not sweep.right_with_images(record[kind])
        and sweep.reason_with_images(kind, record[kind]) is None
    ]
    assert silent == []
    assert sum(sweep.right_with_images(record[kind]) for kind in sweep.image_text()) >= 40


def test_every_line_that_is_not_right_has_its_reason():
    record, _ = sweep.read_record()
    silent = [
        kind
        for kind, found in record.items()
        if not sweep.right(found) and sweep.reason(kind, found) is None
    ]
    assert silent == []


def test_most_types_are_right():
    record, _ = sweep.read_record()
    assert sum(sweep.right(found) for found in record.values() if found["causal"]) >= 120


def test_every_type_of_speech_is_right_or_has_its_reason():
    """And so it is with a recording: what was read of one is what is tested here."""
    found = json.loads(supported_speech.RECORD.read_text("utf-8"))["types"]
    assert {*speech_types.every()} <= found.keys(), (
        "run: python benchmarks/model_types/speech_types.py"
    )
    wrong = {kind: one for kind, one in found.items() if not supported_speech.right(one)}
    for kind, one in wrong.items():
        assert kind in supported_speech.NOTES or one["loads"].startswith("UnsupportedModel"), kind
    assert len(found) - len(wrong) >= 14


@pytest.mark.parametrize("kind", ["moonshine_streaming", "fun_asr_nano", "parakeet_tdt"])
def test_a_type_of_speech_is_found_as_the_record_says(kind):
    found = json.loads(supported_speech.RECORD.read_text("utf-8"))["types"]
    assert speech_types.examine(kind) == found[kind]


def swept(record, *more):
    """What the command finds, written to a file of its own."""
    command = [sys.executable, str(SCRIPT), "--record", str(record), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert record.is_file(), done.stderr
    return json.loads(record.read_text("utf-8"))["types"], done


@pytest.mark.exhaustive
def test_the_command_finds_what_the_record_says(tmp_path):
    kinds = ["llama", "openai-gpt", "t5"]
    found, done = swept(tmp_path / "types.json", "--types", *kinds)
    record, _ = sweep.read_record()
    assert found == {kind: record[kind] for kind in sorted(kinds)}
    assert done.returncode == 1  # of the others nobody knows
    assert "nobody has said why: gemma" in done.stdout


@pytest.mark.slow
def test_the_whole_sweep_finds_what_the_record_says(tmp_path):
    found, done = swept(tmp_path / "types.json")
    assert found == sweep.read_record()[0]
    assert done.returncode == 0
