"""`outrider chat`: a conversation by standard input, with a tiny instruct model."""

import builtins
import json
import sys

import pytest

from outrider import Beams, SamplingParams, Stop, cli
from outrider.cli import chat, console


@pytest.fixture
def typed(monkeypatch):
    """What the user types, line by line; then the input ends."""

    def lines(*texts):
        left = iter(texts)

        def read(prompt=""):
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(builtins, "input", read)

    return lines


def test_several_lines_are_one_message(typed):
    typed("one \\", "two", '"""three', "four", 'five"""', '"""', "six", '"""', "seven")
    assert [chat.listen("") for _ in range(4)] == ["one \ntwo", "three\nfour\nfive", "six", "seven"]
    with pytest.raises(EOFError):
        chat.listen("")


@pytest.mark.parametrize(
    ("lines", "text"), [(['"""one', "two"], "one\ntwo"), (["one \\"], "one "), (['"""'], "")]
)
def test_a_text_that_the_inputs_end_cuts_off_is_one(typed, lines, text):
    typed(*lines)
    assert chat.listen("") == text
    with pytest.raises(EOFError):
        chat.listen("")


def test_a_message_that_does_not_fit_leaves_the_talk_as_it_was(shipped, typed, monkeypatch, capsys):
    told = []
    right = shipped.stream

    def stream(prompts, *rest, **more):
        told.append([turn["role"] for turn in prompts[0]])
        return right(prompts, *rest, **more)

    words = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", words)
    monkeypatch.setattr(shipped, "stream", stream)
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(sys, "argv", ["outrider", "chat", "-n", "4", "--seed", "1"])
    typed("x = 1", "y = 1\n" * 1000, "z = 2")
    cli.main()
    assert told == [["user"], ["user", "assistant", "user"], ["user", "assistant", "user"]]
    out, err = capsys.readouterr()
    assert err.startswith("error: ")
    assert err.endswith("/new forgets the conversation\n")
    assert err.count("\n") == 1
    assert out


WITH_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"
)


def test_a_key_that_is_held_down_stops_the_answer_and_not_the_chat(
    shipped, typed, monkeypatch, capsys
):
    """Ctrl-C while a step runs, and again while that is said, or when the answer is at its end."""
    told, left = [], iter([2, 1])
    right, printed = shipped.stream, console.out.print

    def stream(prompts, *rest, **more):
        told.append([turn["role"] for turn in prompts[0]])
        running = right(prompts, *rest, **more)
        for number, block in enumerate(running):
            if number == next(left, -1):
                raise KeyboardInterrupt
            yield block

    def show(*given, **how):
        if given[:1] in ((" (stopped)",), ("",)):
            raise KeyboardInterrupt
        printed(*given, **how)

    words = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", words)
    monkeypatch.setattr(shipped, "stream", stream)
    monkeypatch.setattr(console.out, "print", show)
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(sys, "argv", ["outrider", "chat", "-n", "4", "--seed", "1"])
    typed("x = 1", "y = 1", "z = 2")
    cli.main()
    assert [len(each) for each in told] == [1, 3, 5]


def test_tools_that_a_model_may_call_and_what_they_gave(
    shipped, typed, monkeypatch, capsys, tmp_path
):
    told, right = [], shipped.stream

    def stream(prompts, *rest, **more):
        ids = prompts[0]
        words = ids if isinstance(ids[0], dict) else shipped.tokenizer.decode(ids)
        told.append(words)
        return right(prompts, *rest, **more)

    tools, wrong = tmp_path / "tools.json", tmp_path / "wrong.json"
    function = {"name": "add", "parameters": {"type": "object", "properties": {}}}
    tools.write_text(json.dumps([{"type": "function", "function": function}]))
    wrong.write_text('{"name": "add"}')
    monkeypatch.setattr(shipped.tokenizer, "chat_template", WITH_TOOLS)
    monkeypatch.setattr(shipped, "stream", stream)
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(sys, "argv", ["outrider", "chat", "-n", "4", "--seed", "1"])
    typed("/result 3", f"/tools {wrong}", f"/tools {tools}", "1 + 2?", "/result 3", "/tools", "so?")
    cli.main()
    out, err = capsys.readouterr()
    assert "(it may call add)" in out
    assert "(it may call nothing)" in out
    assert "got /result and no answer yet" in err
    assert "tools are a list of functions with names" in err
    assert told[0].strip() == "[add]<user>1 + 2?"
    assert told[1].startswith("[add]<user>1 + 2?\n<assistant>")
    assert told[1].rstrip().endswith("<tool>3")
    roles = [turn["role"] for turn in told[2]]
    assert roles == ["user", "assistant", "tool", "assistant", "user"], "no tools, the same talk"


def test_a_model_that_reads_no_file_says_so_before_a_question_is_lost(
    shipped, typed, monkeypatch, capsys, tmp_path
):
    words = "{% for turn in messages %}{{ turn.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", words)
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(sys, "argv", ["outrider", "chat", "-n", "4", "--seed", "1"])
    (tmp_path / "one.png").write_bytes(b"any")
    typed(f"/image {tmp_path / 'one.png'}", "/audio", "x = 1")
    cli.main()
    out, err = capsys.readouterr()
    assert err.count("reads text alone") == 2
    assert err.count("error: ") == 2
    assert out.strip()


def test_a_template_that_knows_of_no_tools(shipped, typed, monkeypatch, capsys, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "add"}}]')
    monkeypatch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
    monkeypatch.setattr(sys, "argv", ["outrider", "chat"])
    typed(f"/tools {tools}", "/tools no-such-file")
    cli.main()
    err = capsys.readouterr().err
    assert "chat template says nothing of tools" in err
    assert "no tools to read" in err


TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}\n{% endfor %}"


@pytest.fixture
def generate(shipped, monkeypatch, capsys):
    """Runs `outrider generate` on the shipped pair: (exit code, stdout, stderr)."""

    def call(*words):
        monkeypatch.setattr("outrider.loading.load", lambda *_, **__: shipped)
        monkeypatch.setattr(sys, "argv", ["outrider", "generate", *words])
        code = 0
        try:
            cli.main()
        except SystemExit as leave:
            code = int(leave.code or 0)
        return code, *capsys.readouterr()

    return call


def test_adapters_are_for_requests_that_name_one(generate):
    code, _, err = generate("def f", "--lora-modules", "sql=folder")
    assert code == 2
    assert "requests that name one (serve, batch); got sql; give its folder as --model" in err


@pytest.mark.parametrize("how", [[], ["--num-beams", "2"]])
def test_a_prompt_may_be_what_a_user_says(shipped, generate, monkeypatch, how):
    monkeypatch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x = 1"}]
    beams = Beams(2) if how else None
    text = shipped.generate([said], SamplingParams(0), Stop(4), beams=beams).texts[0]
    words = ["x = 1", "--system", "be brief", "-n", "4", *how]
    assert generate(*words, "--chat") == (0, text + "\n", "")
    assert generate("x = 1", "--chat", "-n", "4", *how)[1] != text + "\n"
    code, _, err = generate(*words)
    assert code == 2
    assert "--system is the first message of a chat" in err


def test_a_chat_without_a_template_or_with_a_source_is_refused(generate):
    code, out, err = generate("x = 1", "--chat")
    assert (code, out) == (2, "")
    assert "has no chat template" in err
    assert "leave --chat out" in err
    code, _, err = generate("x = 1", "--chat", "--source", "y")
    assert code == 2
    assert "got --source too" in err


def test_an_instruct_model_that_says_nothing_points_to_chat(shipped, generate, monkeypatch):
    first = shipped.generate("x = 1", SamplingParams(0), Stop(1)).completions[0].token_ids
    monkeypatch.setattr(shipped, "eos_ids", tuple(first))
    assert generate("x = 1", "-n", "4") == (0, "\n", "")
    monkeypatch.setattr(shipped.tokenizer, "chat_template", TEMPLATE)
    code, out, err = generate("x = 1", "-n", "4")
    assert (code, out) == (0, "\n")
    assert "--chat" in err
    assert err.count("\n") == 1
    assert generate("x = 1", "-n", "4", "--stop", "zz")[2] == err
    assert "--chat" not in generate("x = 1", "-n", "4", "--chat")[2]
