"""The example plug-in for the `llm` tool, where that is installed; its package in any case."""

import sys
import tomllib
from pathlib import Path

import pytest

from outrider import SamplingParams, Stop

FOLDER = Path(__file__).parents[2] / "examples" / "llm-outrider"


def test_its_entry_point_names_its_module():
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text("utf-8"))["project"]
    (module,) = project["entry-points"]["llm"].values()
    assert (FOLDER / f"{module}.py").is_file()
    assert "outrider" in project["dependencies"]


@pytest.fixture
def plugin(monkeypatch, shipped):
    pytest.importorskip("llm", reason="needs the llm tool")
    monkeypatch.syspath_prepend(FOLDER)
    import llm_outrider

    monkeypatch.setattr(llm_outrider, "loaded", lambda target: shipped)
    yield llm_outrider
    sys.modules.pop("llm_outrider")


def test_an_answer_is_the_librarys(plugin, shipped):
    models = []
    plugin.register_models(models.append)
    prompt = "def fibonacci(n):\n"
    response = models[0].prompt(prompt, temperature=0, max_tokens=24)
    expected = shipped.generate(prompt, SamplingParams(0), Stop(24))
    assert response.text() == expected.texts[0]
    assert response.response_json["speculative_decoding"]["new_tokens"] == 24


def test_a_model_of_text_alone_knows_no_conversation(plugin):
    import llm

    model = plugin.Outrider()
    with pytest.raises(llm.ModelError, match="no conversation"):
        model.prompt("x", system="Be brief.").text()


def test_turns_of_a_talk_come_in_order(plugin, shipped, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    talk = plugin.Outrider().conversation()
    first = talk.prompt("def f(x):", system="Be brief.", temperature=0, max_tokens=6).text()
    second = talk.prompt("And g?", system="Be brief.", temperature=0, max_tokens=6)
    turns = [("system", "Be brief."), ("user", "def f(x):"), ("assistant", first)]
    turns.append(("user", "And g?"))
    told = [{"role": role, "content": content} for role, content in turns]
    expected = shipped.generate([told], SamplingParams(0), Stop(6)).texts[0]
    assert second.text() == expected
