"""The worked examples run, print fewer rounds than plain, and draw their pictures."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "count"), [("epidemic", "--epidemics"), ("diffusion", "--samples")]
)
def test_an_example_prints_fewer_rounds(name, count, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    picture = tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", [name, count, "12", "--picture", str(picture)])
    module.main()
    said = capsys.readouterr().out
    plain, speculative = (int(n) for n in re.findall(r"(\d+) rounds of the slow", said))
    assert speculative < plain / 3
    assert float(re.search(r"KS p = ([\d.]+)", said)[1]) > 1e-3
    assert picture.stat().st_size > 5000
