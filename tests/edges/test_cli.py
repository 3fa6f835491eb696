"""The command line: errors with exit codes, one JSON document, no colour codes in a pipe."""

import errno
import importlib
import io
import json
import os
import pty
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from outrider import SamplingParams, Stop, load, verifiers
from outrider.cli import console
from outrider.costs import Costs
from outrider.engine import step
from outrider.engine.speculation_policy import measure
from outrider.models import budget, calibrate
from outrider.models.cpu_kernels import build
from outrider.shipped import shipped

FAST = ["--dtype", "float32", "--threads", "1"]
PROMPT = "def add(a, b):"
COLOUR = re.compile(rb"\x1b\[[0-9;]*m")


@pytest.fixture(autouse=True)
def no_measuring(monkeypatch):
    """Packing is left to "auto" on the command line; measuring it is not what is tested here."""
    monkeypatch.setattr(
        sys.modules["outrider.models.runtime_config"], "can_pack", lambda dtype: False
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model", "no/such/model"], ["no/such/model", "check the path"]),
        (["--draft-model", "no/such/model"], ["draft model", "no/such/model"]),
        (["-t", "-1"], ["temperature", "-1", "greedy"]),
        (["--top-p", "0"], ["top_p", "(0, 1]"]),
        (["--length-penalty", "2"], ["--length-penalty", "--num-beams"]),
        (["--num-beams", "2", "--stream"], ["--num-beams", "--stream", "drop one"]),
        (["--top-p", "1.5"], ["top_p", "1.5"]),
        (["--top-k", "-2"], ["top_k", "-2"]),
        (["--min-p", "2"], ["min_p", "2"]),
        (["-n", "0"], ["max_new_tokens", "0"]),
        (["-n", "many"], ["--max-new-tokens", "valid integer"]),
        (["-k", "0"], ["num_speculative_tokens", "0", "drafter 'none'"]),
        (["--drafter", "oracle"], ["oracle", "prompt_lookup"]),
        (["--rule", "rejektion"], ["rejektion", "rejection"]),
        (["--rule", "block", "--branching", "2,2"], ["block", "traversal"]),
        (["--branching", "2,2", "-k", "4"], ["num_speculative_tokens=4", "leave"]),
        (["--drafter", "static_tree", "--tree-acceptance", "0.5,x"], ["0.5,x", "0.6,0.15"]),
        (["--drafter", "static_tree", "--total-tokens", "8"], ["acceptance", "give both"]),
        (["--branching", "2,x"], ["2,x", "3,2,1"]),
        (["--branching", "2,0"], ["2,0", "3,2,1"]),
        (["--dtype", "int3"], ["int3"]),
        (["--json", "--stream"], ["--json", "--stream"]),
        (["--json", "--trace"], ["--json", "--trace"]),
        (["--no-such-option"], ["no-such-option"]),
        (["--file", "no/such/file"], ["--file"]),
        (["--stop", ""], ["stop string is empty"]),
        (["--timeline", "x.jpg"], ["'x.jpg'; give a name that ends in .svg"]),
        (["--timeline", "x.svg", "--num-beams", "2"], ["steps of one text", "--num-beams"]),
    ],
)
def test_bad_options(outrider, words, parts):
    code, out, err = outrider("generate", PROMPT, *words)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for part in parts:
        assert part in err


def test_bad_prompts(outrider, tmp_path):
    bad = tmp_path / "latin.py"
    bad.write_bytes(b"name = 'caf\xe9'")
    long = tmp_path / "long.py"
    long.write_text("x = 1\n" * 400 + "y")
    for words, parts in [
        (["--file", bad], ["latin.py", "not valid UTF-8", "0xe9", "offset 11"]),
        (["--file", tmp_path / "none"], ["none", "No such file", "check the path"]),
        (["--file", tmp_path], ["cannot read"]),
        ([""], ["prompt is empty"]),
        (["--file", long, *FAST], ["tokens", "context is 512", "shorten"]),
    ]:
        code, out, err = outrider("generate", *words)
        assert (code, out) == (2, "")
        for part in parts:
            assert part in err


def test_unknown_commands_and_help(outrider):
    code, _, err = outrider("conjure")
    assert code == 2
    assert "conjure" in err
    code, out, _ = outrider("--help")
    assert code == 0
    assert "generate" in out
    assert "demo" in out


@pytest.mark.parametrize("words", [[], ["generate"], ["bench", "alpha"]])
def test_help_has_a_short_name_everywhere(outrider, words):
    code, out, err = outrider(*words, "-h")
    assert (code, err) == (0, "")
    assert "Usage: " in out
    assert "-h" in out
    assert out == outrider(*words, "--help")[1]


@pytest.fixture(scope="module")
def expected():
    pair = load(dtype="float32", threads=1, pack_weights=False)
    return pair.generate(PROMPT, SamplingParams(0), Stop(12)).completions[0]


def test_text_goes_to_standard_output(outrider, expected):
    dynamic = ["--drafter", "dynamic_tree", "--total-tokens", 8, "--width", 3, "-k", 4]
    best = ["--drafter", "static_tree", "--tree-acceptance", "0.6,0.2", "--total-tokens", 6]
    for extra in (
        [],
        ["--drafter", "none"],
        ["--branching", "2,2"],
        ["--branching", "2,2", "-k", 2],
        [] if build.unbuilt() else ["--draft-dtype", "int8"],
        dynamic,
        best,
        ["--stream"],
    ):
        code, out, err = outrider("generate", PROMPT, "-n", 12, *FAST, *extra)
        assert (code, out, err) == (0, expected.text + "\n", "")


def test_json_is_one_document(outrider, expected):
    code, out, err = outrider("generate", PROMPT, "-n", 12, "--json", *FAST)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["text"] == expected.text
    assert document["token_ids"] == expected.token_ids
    assert document["finish_reason"] == "length"
    assert document["stats"]["new_tokens"] == 12
    assert (document["drafter"], document["rule"], document["exact"]) == (
        "draft_model",
        "match",
        True,
    )


def test_lossy_rules_say_so_wherever_they_show(outrider):
    lossy = ["-n", 2, "-t", 1, "--rule", "typical", *FAST]
    code, out, err = outrider("generate", PROMPT, "--json", "-v", *lossy)
    assert code == 0
    document = json.loads(out)
    assert (document["rule"], document["exact"]) == ("typical", False)
    assert "drafter draft_model, rule typical (lossy" in err
    _, out, _ = outrider("generate", "--help")
    assert "lenience (lossy)" in " ".join(out.replace("│", " ").split())
    for words in (["--rule", "typica"], ["--rule", "block", "--branching", "2,2"]):
        _, _, err = outrider("generate", PROMPT, *words)
        known = err.split("known: " if "known: " in err else "rules that can: ")[1]
        names = known.split(".")[0].strip().split(", ")
        assert set(names) & {"traversal", "rejection"}
        for name in names:
            assert name.endswith(" (lossy)") != verifiers.get(name.split()[0]).exact


def test_verbose_goes_to_standard_error(outrider, expected):
    code, out, err = outrider("generate", PROMPT, "-n", 12, "-v", *FAST)
    assert (code, out) == (0, expected.text + "\n")
    assert re.search(r"weights .*float32.*, 1 thread\(s\)", err)


def test_interruption_prints_what_was_generated(outrider, expected, monkeypatch):
    score, left = step.score, [4]

    def tired(*args):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return score(*args)

    monkeypatch.setattr(step, "score", tired)
    code, out, err = outrider("generate", PROMPT, "-n", 100, *FAST)
    assert code == 130
    assert len(out) > 4
    assert out[:4] == expected.text[:4]
    assert "interrupted" in err


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_steps_cost_is_measured_behind_the_text(outrider, expected, monkeypatch, interrupted):
    """The text goes by a look, and is not measured at all where kernels are still to come."""
    told, measured = [], []

    def looked(engine, rows):
        measured.append((sum(map(len, told)), budget.current().seconds > 0))
        yield
        if interrupted and measured[-1][1]:
            raise KeyboardInterrupt
        return Costs.of({1: 10.0, 3: 12.0})

    monkeypatch.setattr(measure, "measured", looked)
    monkeypatch.setattr(calibrate, "recall_costs", lambda key: None)
    monkeypatch.setattr(calibrate, "remember_costs", lambda key, costs: None)
    monkeypatch.setattr(importlib.import_module("outrider.cli.generate"), "put", told.append)
    words = ["generate", PROMPT, "-n", 12, "--stream", "--planner", "adaptive", *FAST]
    assert outrider(*words)[0] == 0
    assert "".join(told) == expected.text + "\n"
    assert measured == [(0, False), (len("".join(told)), True)]
    monkeypatch.setattr(build, "late", lambda: True)
    assert outrider(*words)[0] == 0
    assert measured[2:] == [(len("".join(told)) // 2, False)]


def test_a_seeded_text_is_planned_by_what_is_kept(outrider, monkeypatch):
    """A look would have planned it otherwise than the next run, and another text is drawn then."""
    cheap, dear = Costs.of({1: 10.0, 3: 10.1, 5: 10.2}), Costs.of({1: 10.0, 3: 900.0, 5: 990.0})
    kept = []

    def looked(engine, rows):
        yield
        return dear if budget.current().seconds > 0 else cheap

    monkeypatch.setattr(measure, "measured", looked)
    monkeypatch.setattr(calibrate, "recall_costs", lambda key: kept[0] if kept else None)
    monkeypatch.setattr(calibrate, "remember_costs", lambda key, costs: kept.append(costs))
    words = ["generate", PROMPT, "-n", 40, "-t", 0.9, "--seed", 3, "--planner", "adaptive", *FAST]
    first = outrider(*words)[1]
    assert kept == [dear]
    assert outrider(*words)[1] == first
    kept[0] = cheap  # the control: what it is planned by is seen in the text
    assert outrider(*words)[1] != first


def test_a_measurement_that_fails_behind_the_text_is_no_failure(outrider, expected, monkeypatch):
    def looked(engine, rows):
        yield
        if budget.current().seconds > 0:
            raise RuntimeError("can't allocate memory")
        return Costs.of({1: 10.0, 3: 12.0})

    monkeypatch.setattr(measure, "measured", looked)
    monkeypatch.setattr(calibrate, "recall_costs", lambda key: None)
    code, out, err = outrider("generate", PROMPT, "-n", 12, "--planner", "adaptive", *FAST)
    assert (code, out) == (0, expected.text + "\n")
    assert "was not measured: can't allocate memory" in err


class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("shown", [["--stream"], []])
def test_an_output_that_is_closed_is_no_verdict(outrider, monkeypatch, shown):
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # both are replaced where a pipe breaks
    assert outrider("generate", PROMPT, "-n", "8", *FAST, *shown)[0] == 141


def environment(**more):
    clean = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
    return clean | {"OMP_NUM_THREADS": "1"} | more


COMMAND = [sys.executable, "-m", "outrider", "generate", "-n", "8", "--trace", *FAST]
COMMAND += ["--planner", "fixed"]  # nothing is measured


def test_a_pipe_gets_no_colour_codes():
    run = subprocess.run(
        [*COMMAND, "--drafter", "prompt_lookup"],
        input=PROMPT.encode(),
        capture_output=True,
        env=environment(TERM="xterm-256color"),
        check=True,
    )
    assert run.stdout.strip()
    assert not COLOUR.search(run.stdout + run.stderr)


@pytest.mark.exhaustive
@pytest.mark.parametrize("silent", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_terminal_gets_colours_unless_no_color_is_set(silent):
    more = {"NO_COLOR": "1"} if silent else {}
    parent, child = pty.openpty()
    run = subprocess.Popen(
        [*COMMAND, PROMPT],
        stdin=subprocess.DEVNULL,
        stdout=child,
        stderr=child,
        env=environment(TERM="xterm-256color", **more),
    )
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    assert run.wait() == 0
    assert bool(COLOUR.search(shown)) != silent


def test_no_color_reaches_both_consoles(monkeypatch):
    for silent in (True, False):
        monkeypatch.setenv("NO_COLOR", "1" if silent else "")
        made = runpy.run_path(console.__file__)
        assert made["out"].no_color == made["err"].no_color == silent


def test_the_packaged_pair_is_complete():
    for part in ("target", "draft"):
        assert (shipped(part) / "model.safetensors").stat().st_size > 1e6
        assert (shipped(part) / "tokenizer.json").is_file()
    assert "PYTHON SOFTWARE FOUNDATION" in shipped("LICENSE-PSF.txt").read_text()
    assert "Weaknesses" in shipped("MODEL_CARD.md").read_text()


def test_beams_are_one_document_with_their_score(outrider):
    code, out, _ = outrider("generate", PROMPT, "-n", "8", *FAST, "--num-beams", "3", "--json")
    assert code == 0
    document = json.loads(out)
    assert document["score"] < 0
    assert document["stats"]["new_tokens"] == len(document["token_ids"])


def test_verbose_describes_a_beam_search(outrider):
    code, _, err = outrider("generate", PROMPT, "-n", "8", *FAST, "--num-beams", "3", "-v")
    assert code == 0
    assert "beam search of 3 beams" in err
    assert "rule" not in err
    assert "planner" not in err
    assert re.search(r"^beam search: \d+ calls of the target for 8 tokens, took \d+ ms$", err, re.M)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("generate x -m A --model=B", ["--model", "'A' and 'B'"]),
        ("generate x -t 0 --temperature 0.5", ["--temperature", "'0' and '0.5'"]),
        ("serve --port 1 --port 2", ["--port", "'1' and '2'"]),
        ("transcribe a.wav --language en --language de", ["--language", "'en' and 'de'"]),
        ("chat --model A --model B", ["--model", "'A' and 'B'"]),
        ("batch a b --max-num-seqs 1 --max-num-seqs 2", ["--max-num-seqs", "'1' and '2'"]),
        ("bench peers --limit 1 --limit 2", ["--limit", "'1' and '2'"]),
        (
            "serve --per-request-metrics --no-per-request-metrics",
            ["got --per-request-metrics and --no-per-request-metrics"],
        ),
    ],
)
def test_two_values_of_an_option_that_has_one_are_refused(outrider, words, parts):
    """The last one won without a word: `--model A --model B` was B."""
    code, _, err = outrider(*words.split())
    assert code == 2
    assert all(part in err for part in (*parts, "give one of them"))


@pytest.mark.parametrize("more", ["--cors-origin a --cors-origin b", "--no-auth --no-auth", ""])
def test_what_may_be_repeated_is(outrider, more):
    code, _, err = outrider(*f"serve --model A -m A {more} --timeout -1 --port 0".split())
    assert code == 2
    assert ("--timeout" if "cors" not in more else "--cors-origin") in err


@pytest.mark.parametrize("words", [(None, None), ("-", None), (None, Path("-"))])
def test_a_prompt_of_standard_input_is_named_as_a_source_is(monkeypatch, words):
    """`generate -` went on from a hyphen."""
    given = io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfone\r\ntwo"), "utf-8")
    monkeypatch.setattr(sys, "stdin", given)
    assert console.read_prompt(*words) == "one\r\ntwo"


def test_the_mark_that_editors_begin_a_file_with_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfThe sky")
    assert console.read_prompt(None, tmp_path / "a.txt") == "The sky"
    assert console.read_source(str(tmp_path / "a.txt")) == "The sky"
