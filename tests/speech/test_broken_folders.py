"""Files of a Whisper's folder that say what cannot be: one clear error with the folder's path."""

import json
import re
import shutil

import pytest
import whispers

import outrider
from outrider.errors import OutriderError

LOAD = {"dtype": "float32", "threads": 1, "pack_weights": False, "drafter": "none"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    for part in (whispers.whisper(), whispers.tokenizer(), whispers.extractor()):
        part.save_pretrained(folder)
    return folder


def heard(folder):
    return outrider.load(folder, **LOAD).transcribe(whispers.sound(1, 3))


@pytest.mark.parametrize("data", ["", "{", "[]", '"x"', b"\xff"])
@pytest.mark.parametrize("file", ["preprocessor_config.json", "generation_config.json"])
def test_a_file_that_is_no_configuration(tmp_path, whole, file, data):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / file).write_bytes(data if isinstance(data, bytes) else data.encode())
    with pytest.raises(OutriderError, match=re.escape(str(folder))):
        heard(folder)


@pytest.mark.parametrize(
    ("file", "wrong"),
    [
        ("preprocessor_config.json", {"chunk_length": "x"}),
        ("preprocessor_config.json", {"chunk_length": 20}),
        ("preprocessor_config.json", {"feature_size": 128}),
        ("preprocessor_config.json", {"hop_length": -1}),
        ("preprocessor_config.json", {"n_fft": None}),
        ("preprocessor_config.json", {"sampling_rate": 0}),
        ("preprocessor_config.json", {"padding_side": "middle"}),
        ("generation_config.json", {"eos_token_id": "x"}),
        ("generation_config.json", {"eos_token_id": []}),
        ("generation_config.json", {"decoder_start_token_id": -1}),
        ("generation_config.json", {"decoder_start_token_id": 10**9}),
        ("generation_config.json", {"lang_to_id": 3}),
        ("generation_config.json", {"task_to_id": {}}),
        ("generation_config.json", {"alignment_heads": "x"}),
        ("generation_config.json", {"begin_suppress_tokens": 1.5}),
        ("generation_config.json", {"no_timestamps_token_id": {}}),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else one.split("_")[0],
)
def test_a_value_that_cannot_be(tmp_path, whole, file, wrong):
    folder = shutil.copytree(whole, tmp_path / "model")
    said = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(said | wrong))
    with pytest.raises(OutriderError, match=re.escape(str(folder))):
        heard(folder)


def test_a_folder_without_an_extractor_has_the_usual_one(tmp_path, whole):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / "preprocessor_config.json").unlink()
    assert heard(folder).text == heard(whole).text
