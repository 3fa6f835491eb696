"""`bench beams` on tiny models: every arm's beams are the tree's, and its calls are foretold."""

from types import SimpleNamespace

import pytest

from outrider import DraftModel, Engine, Root, Speculator
from outrider_lab.papers import beams
from tiny import VOCAB, pair


class _Letters:
    def __call__(self, text, **_):
        return {"input_ids": self.encode(text)}

    def encode(self, text, **_):
        return [ord(letter) % VOCAB for letter in text]


NOTES = SimpleNamespace(target="tiny", draft="tiny", dtype="float32", threads=1, packed=False)
PROMPTS = [{"prompt": "abcabcab"}, {"prompt": "xyxyx"}]


def rows(drafter, out):
    target, _ = pair()
    speculator = Speculator(Engine(target, drafter), _Letters(), (), NOTES)
    how = {"new_tokens": 24, "widths": (2,)}
    found = beams.run(speculator, PROMPTS, out, lambda *_: None, **how)["beams"]
    return {(row["scored ahead"], row["u"], row["gamma"]): row for row in found}


def test_with_a_draft_model(tmp_path):
    target, _ = pair()
    found = rows(DraftModel(target, (1,)), tmp_path)  # the target drafts for itself
    assert all(row["same beams"] == "2/2" for row in found.values())
    tree, draft = found["tree", None, 0], found["draft", 2, 2]
    assert tree["calls/step"] == 1
    assert draft["calls/step"] < 0.5
    assert draft["predicted"] == pytest.approx(draft["calls/step"], rel=0.15)
    assert draft["nodes/call"] > tree["nodes/call"]


def test_a_target_alone_has_copies(tmp_path):
    found = rows(Root(), tmp_path)
    assert {name for name, _, _ in found} == {"tree", "copy", "copy, chosen"}
    assert all(row["same beams"] == "2/2" for row in found.values())
    assert found["copy", None, 6]["nodes/call"] > found["tree", None, 0]["nodes/call"]


def test_other_beams_are_noticed(tmp_path, monkeypatch):
    right = beams._search

    def wrong(speculator, arm, request, pace):
        found = right(speculator, arm, request, pace)
        if arm.name == "copy":
            found.hypotheses[0][0].token_ids.append(0)
        return found

    monkeypatch.setattr(beams, "_search", wrong)
    found = rows(Root(), tmp_path)
    assert found["copy", None, 3]["same beams"] == "0/2"
    assert found["tree", None, 0]["same beams"] == "2/2"
