"""What a grammar lets a model write is what the parser reads: every format, whole and in pieces."""

import copy
import json
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from outrider.errors import UnknownName
from outrider.server.call_formats import gemma_as_json
from outrider.server.grammar import ReasoningMarks, ToolCalls, answer_grammar, closed, vocabulary
from outrider.server.message_parser import MessageParser
from outrider.server.messages import Allowed, Function
from outrider.server.tool_parsers import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_parser,
    tool_parser,
)

ARGUMENTS = {"city": 'Par"is {', "days": 3, "tags": ["a", "b"], "unit": "C"}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city"],
}
FUNCTIONS = (Function(name="weather", parameters=SCHEMA), Function(name="now"))
NEWER = tool_parser(None, "[TOOL_CALLS] [ARGS]")
HERMES, LLAMA, MISTRAL, GEMMA, JSON = (
    TOOL_PARSERS[name] for name in ("hermes", "llama3_json", "mistral", "functiongemma", "json")
)
MARKS = sorted({mark for p in (HERMES, MISTRAL, NEWER, GEMMA) for mark in p.markers})
TEXTS = [
    (
        HERMES,
        'Hi <tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    (
        LLAMA,
        '{"name": "weather", "parameters": ARGUMENTS}; {"name": "now", "parameters": {}}',
    ),
    (
        MISTRAL,
        'Hi [TOOL_CALLS] [{"name": "weather", "arguments": ARGUMENTS}, '
        '{"name": "now", "arguments": {}}]',
    ),
    (NEWER, "Hi[TOOL_CALLS]weather[ARGS]ARGUMENTS[TOOL_CALLS]now[ARGS]{}"),
    (
        GEMMA,
        'Hi <start_function_call>call:weather{city:<escape>Par"is {<escape>,days:3,'
        "tags:[<escape>a<escape>,<escape>b<escape>],unit:<escape>C<escape>}<end_function_call>"
        "<start_function_call>call:now{}<end_function_call>",
    ),
]
#: What models write that are left to themselves.
FOUND = [
    'Hi\n```json\n{\n  "name": "weather",\n  "arguments": SPACED\n}\n```\n'
    '```json\n{"name": "now", "arguments": {}}\n```',
    'Hi\n{"name": "weather", "arguments": ARGUMENTS}\n{"name": "now", "parameters": {}}',
    '{"name":"weather","arguments":ARGUMENTS}',
    'Hi\n```\n[{"name": "weather", "arguments": ARGUMENTS}, '
    '{"name": "now", "arguments": {}}]\n```\n',
    'Hi <tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>'
    '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
]
SPACED = json.dumps(ARGUMENTS, indent=4)
FOUND = [t.replace("ARGUMENTS", json.dumps(ARGUMENTS)).replace("SPACED", SPACED) for t in FOUND]
TEXTS = [(parser, text.replace("ARGUMENTS", json.dumps(ARGUMENTS))) for parser, text in TEXTS]
THOUGHTS = [
    None,
    ReasoningMarks("<think>", "</think>", False),
    ReasoningMarks("<think>", "</think>", True),
]


@pytest.fixture(scope="module", params=["text", "tokens", "special tokens"])
def tokenizer(request, shipped):
    """One whose marks are text, tokens, or tokens that decoding leaves out."""
    one = copy.deepcopy(shipped.tokenizer)
    marks = [*MARKS, "<think>", "</think>", "<other>"]
    if request.param != "text":
        one.add_tokens(marks, special_tokens=request.param != "tokens")
    return one


def matcher(tokenizer, grammar):
    words = vocabulary(tokenizer, len(tokenizer), (tokenizer.eos_token_id,))
    made = LLMatcher(words, grammar)
    assert not made.get_error(), made.get_error()
    return made


def grammar(tokenizer, calls, thought=None, content=None):
    return answer_grammar(tokenizer, (tokenizer.eos_token_id,), content, calls, thought)


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def taken(tokenizer, grammar, text):
    """Whether it may be written, and be the whole answer; whether it may be its beginning."""
    made = matcher(tokenizer, grammar)
    tokens = ids(tokenizer, text)
    begins = made.try_consume_tokens(tokens) == len(tokens)
    return begins and made.is_accepting(), begins


def read(parser, text, size):
    """Reasoning, content and calls of a text that comes in pieces."""
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    reasoning, content, calls = "", "", {}
    for at, piece in enumerate(pieces):
        parts = parser.push(piece, last=at == len(pieces) - 1)
        reasoning, content = reasoning + parts.reasoning, content + parts.content
        for call in parts.calls:
            if call.id is not None:
                calls[call.index] = [call.name, ""]
            calls[call.index][1] += call.arguments
    return reasoning, content, [(name, json.loads(given)) for name, given in calls.values()]


@pytest.mark.parametrize("thought", THOUGHTS, ids=["none", "own", "opened"])
@pytest.mark.parametrize("must", [False, True])
@pytest.mark.parametrize(("parser", "text"), TEXTS, ids=lambda one: getattr(one, "name", ""))
def test_what_may_be_written_is_what_is_read(tokenizer, parser, text, must, thought):
    if must:
        text = text.removeprefix("Hi").lstrip()
    said = "Hi" if text.startswith("Hi") else ""
    if thought is not None:
        text = (
            "" if thought.opened else "<think>"
        ) + f"\nhm{parser.opening} {{\n</think>\n\n{text}"
    calls = ToolCalls(Allowed(FUNCTIONS, must=must), parser)
    assert taken(tokenizer, grammar(tokenizer, calls, thought), text)[0]
    for size in (1, 3, 7, len(text)):
        marks = None if thought is None else REASONING_PARSERS["qwen3"]
        opened = thought is not None and thought.opened
        found = read(MessageParser(marks, opened, parser, ["weather", "now"]), text, size)
        thinking = f"hm{parser.opening} {{" if thought is not None else ""
        assert found == (thinking, said, [("weather", ARGUMENTS), ("now", {})]), size


@pytest.mark.parametrize(("parser", "text"), TEXTS, ids=lambda one: getattr(one, "name", ""))
def test_what_is_no_call_of_these_functions_may_not_be_written(tokenizer, parser, text):
    free = grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS), parser))
    wrong = ["weather", "days", "city"] if parser is not GEMMA else ["call:weather", "days", "city"]
    for word in wrong:
        assert taken(tokenizer, free, text.replace(word, "other")) == (False, False), word
    assert not taken(tokenizer, free, text.replace(":3" if parser is GEMMA else ": 3", ': "3"'))[0]
    one = grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS, several=False), parser))
    assert not taken(tokenizer, one, text)[0]
    only = grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS[1:]), parser))
    assert not taken(tokenizer, only, text)[1]
    must = grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS, must=True), parser))
    assert not taken(tokenizer, must, "Hi")[1]
    assert taken(tokenizer, free, "Hi, you <b>there</b>.")[0]


@pytest.mark.parametrize("text", FOUND)
@pytest.mark.parametrize("thought", [None, "<think>ha\n```json\n</think>\n"])
def test_calls_in_fences_or_not_are_found(tokenizer, text, thought):
    calls = ToolCalls(Allowed(FUNCTIONS), JSON)
    marks = None if thought is None else THOUGHTS[1]
    made, whole = grammar(tokenizer, calls, marks), (thought or "") + text
    assert taken(tokenizer, made, whole)[0]
    right = [("weather", ARGUMENTS), ("now", {})][: 2 if "now" in text else 1]
    said = "Hi" if text.startswith("Hi") else ""
    for size in (1, 2, 3, 7, len(whole)):
        parser = MessageParser(
            thought and REASONING_PARSERS["qwen3"], False, JSON, ["weather", "now"]
        )
        found = read(parser, whole, size)
        assert found == ("ha\n```json" if thought else "", said, right), size
    for word in ("days", "city"):
        assert taken(tokenizer, made, whole.replace(word, "other")) == (False, False), word
    assert not taken(tokenizer, made, whole.replace(": 3", ': "3"'))[1]
    one = grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS, several=False), JSON), marks)
    assert taken(tokenizer, one, whole)[0] == ("now" not in text)


@pytest.mark.parametrize(
    "text",
    [
        'Write {"name": "weather", "arguments": {"city": 3}} for it.',
        '```json\n{\n  "name": "Anna",\n  "arguments": {}\n}\n```\nThat is all. ',
        '{"name": "weather forecast"}',
        '```python\n{"name": "weather", "arguments"}\n```',
        "a < b\n``",
        '[1, 2]\n{"na',
    ],
)
def test_other_json_is_text(tokenizer, text):
    assert taken(tokenizer, grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS), JSON)), text)[0]
    for size in (1, 2, 5, len(text)):
        parser = MessageParser(None, False, JSON, ["weather", "now"])
        assert read(parser, text, size) == ("", text, []), size


def test_free_text_has_any_token(tokenizer):
    """Those that are no text, too: a grammar that asks for nothing yet changes no law."""
    made = matcher(
        tokenizer, grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS), HERMES), THOUGHTS[2])
    )
    assert made.try_consume_tokens(ids(tokenizer, "a <other> b</think> c <other> d")) > 0
    assert made.is_accepting()
    assert not made.try_consume_tokens([tokenizer.eos_token_id] * 2) > 1


def test_a_schema_is_followed_behind_a_thought(tokenizer):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    given = str(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    behind = grammar(tokenizer, None, THOUGHTS[1], given)
    for text in ('<think>{"b"</think>\n{"a": 1}', '{"a": 1}'):
        assert taken(tokenizer, behind, text)[0], text
    assert not taken(tokenizer, behind, '<think>{"b"</think>\n{"b"')[1]
    assert grammar(tokenizer, None, None, given) == given
    assert grammar(tokenizer, None, THOUGHTS[1]) is None
    either = grammar(tokenizer, ToolCalls(Allowed(FUNCTIONS), HERMES), None, given)
    assert taken(tokenizer, either, '{"a": 1}')[0]
    assert taken(tokenizer, either, TEXTS[0][1].removeprefix("Hi "))[0]
    assert not taken(tokenizer, either, "Hi")[1]


@pytest.mark.parametrize("size", [1, 1000])
def test_what_broke_off_is_told_as_far_as_it_is_certain(size):
    def parser():
        return MessageParser(REASONING_PARSERS["qwen3"], False, HERMES, ["f"])

    assert read(parser(), "<think> so", size) == ("so", "", [])
    assert read(parser(), "so <tool_", size) == ("", "so <tool_", [])
    assert read(parser(), "so  ", size) == ("", "so  ", [])
    assert read(parser(), "<thin", size) == ("", "<thin", [])
    assert read(parser(), "<tool_call>\n{", size) == ("", "", [])
    llama = MessageParser(None, False, LLAMA, ["f"])
    assert read(llama, '{"name": "g", "parameters": {}}', size)[1].startswith('{"name": "g"')
    half = MessageParser(None, False, HERMES, ["f"]).push(
        '<tool_call>\n{"name": "f", "arguments": {"a": ', True
    )
    assert half.calls[0].arguments == '{"a": '


def test_formats_are_found_in_templates():
    assert tool_parser(None, "{{ x }}") is None
    assert tool_parser(None, "<tool_call><function={{ name }}> arguments") is None
    assert tool_parser(None, 'ipython "parameters": ') is LLAMA
    assert tool_parser(None, "<start_function_call>") is GEMMA
    assert tool_parser("mistral", "[TOOL_CALLS][ARGS]") is NEWER
    assert tool_parser("mistral", "") is MISTRAL
    assert tool_parser("none", "<tool_call> arguments") is None
    assert reasoning_parser(None, "</think>") is REASONING_PARSERS["deepseek_r1"]
    assert reasoning_parser("none", "</think>") is None
    for unknown in (tool_parser, reasoning_parser):
        with pytest.raises(UnknownName, match=r"'qwen9'.*none"):
            unknown("qwen9", "")
    assert len(MessageParser(None, False, MISTRAL, [])._id()) == 9


def test_functions_have_the_arguments_that_they_list():
    nested = {"type": "object", "properties": {"a": {"type": "object", "properties": {"b": {}}}}}
    shut = closed(nested)
    assert shut["additionalProperties"] is False
    assert shut["properties"]["a"]["additionalProperties"] is False
    assert closed(nested | {"additionalProperties": True})["additionalProperties"] is True
    assert "additionalProperties" not in closed({"type": "object"})


def test_arguments_of_gemma(tokenizer):
    """Optional ones in their order, values of every kind, and what it has no grammar for."""
    inner = {"type": "object", "properties": {"x": {"type": "number"}, "y": {"type": "null"}}}
    several = {
        "type": "object",
        "properties": {
            "a": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "b": {"$ref": "#/$defs/inner"},
            "c": {"type": "array", "items": {"type": "integer"}},
        },
        "$defs": {"inner": inner},
        "required": ["b"],
    }
    calls = ToolCalls(Allowed((Function(name="f", parameters=several),), must=True), GEMMA)
    made = grammar(tokenizer, calls)
    for given, right in [
        ("{a:true,b:{x:-1.5,y:null},c:[1,2]}", True),
        ("{b:{y:null}}", True),
        ("{b:{},c:[]}", True),
        ("{a:null}", False),
        ("{b:{}c:[]}", False),
        ("{,b:{}}", False),
    ]:
        text = f"<start_function_call>call:f{given}<end_function_call>"
        assert taken(tokenizer, made, text)[0] == right, given
        if right:
            assert set(json.loads(gemma_as_json(given))) <= {"a", "b", "c"}
    assert gemma_as_json('{a:<escape>"\n<escape>,b:[{c:1}]}') == '{"a": "\\"\\n", "b": [{"c": 1}]}'
    for odd in ({"minimum": 3}, {"$ref": "#/$defs/no"}, {"type": "date"}, {"pattern": "a"}):
        function = Function(name="f", parameters={"type": "object", "properties": {"a": odd}})
        with pytest.raises(ValueError, match="schema"):
            grammar(tokenizer, replace(calls, allowed=Allowed((function,))))
