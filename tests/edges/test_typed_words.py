"""What is typed: text in a poor locale, models and drafters that lack a part."""

import os
import shutil
import subprocess
import sys

import pytest

from outrider.cli import console
from outrider.shipped import shipped

FAST = ["--dtype", "float32", "--threads", "1"]


def test_text_is_read_where_the_locale_has_ascii_alone():
    """Python leaves the bytes of what is typed there in halves, and cannot print beyond ASCII."""
    said = "Schl\udcc3\udcbcssel"
    assert console.read_prompt(said, None) == console.read_source(said) == "Schlüssel"
    assert console.as_typed("caf\udce9") == "caf\udce9"  # no UTF-8 either: refused as a prompt
    code = "from outrider.cli import console; console.speak_utf8(); console.put(input())"
    where = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], input="é 你好".encode(), env=where, capture_output=True
    )
    assert (done.returncode, done.stdout.decode()) == (0, "é 你好"), done.stderr.decode()


def test_a_model_without_a_tokenizer_is_refused_before_its_weights_are_read(outrider, tmp_path):
    for name in ("config.json", "generation_config.json"):
        shutil.copy(shipped("target") / name, tmp_path)
    for words in (["generate", "x"], ["chat"], ["serve", "--port", 0]):
        code, _, err = outrider(*words, "--model", tmp_path, *FAST)
        assert code == 2
        assert f"no tokenizer was found with the model; got {tmp_path}; put its tokenizer" in err


@pytest.mark.parametrize(
    ("drafter", "option"), [("beam", "--draft-model"), ("ngram_table", "--table")]
)
def test_what_a_drafter_lacks_is_named_as_it_is_typed(outrider, drafter, option):
    code, _, err = outrider("generate", "x", "--model", shipped("target"), "--drafter", drafter)
    assert code == 2
    assert option in err
