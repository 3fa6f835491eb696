"""GBNF means here what it means to llama.cpp: what grammars let through, character by character."""

import pytest
from llguidance import LLMatcher, LLTokenizer

from outrider.server import gbnf

BYTES = LLTokenizer("byte")


def accepts(grammar, text):
    matcher = LLMatcher(BYTES, gbnf.convert(grammar))
    assert not matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "text", "not_this"),
    [
        (r'root ::= "\u00e9ab"', "éab", "\ue9ab"),
        (r'root ::= "\U0001F600" "\x41\n"', "😀A\n", "😀A"),
        (r"root ::= [\u00e9a]", "é", "e"),
        (r'root ::= "a\]b\\" "\""', 'a]b\\"', "a]b"),
        ("root ::= [a&&b]+", "a&b", "c"),
        ("root ::= [a~~b]+", "a~b", "&"),
        (r"root ::= [\]\-\^[a]+", "]-^[a", "b"),
        (r"root ::= [\x41-\x43_-]+", "ABC_-", "D"),
        (r"root ::= [+--]+ [--/] [a\-c]", "+,-.-", "+,-.b"),
        ("root ::= [%--9a-]+", "%&-9a", "."),
        ("root ::= [^+--]", "*", ","),
        (r'root ::= "\x1b[\x07"{2}', "\x1b[\x07\x1b[\x07", "\x1b[\x07"),
        (r'root ::= "\x7fa\x80"', "\x7fa\x80", "a"),
        ("root ::= .", "\n", "ab"),
        (r'root ::= [^"\\] "x/y" [/]', "qx/y/", '"x/y/'),
        ('root ::= a # b "::= [\na ::= "1" | "2"', "2", "3"),
        ('root ::= ws "a"\nws ::= [ \\t\\n]*', "\t a", "b"),
    ],
)
def test_a_grammar_lets_through_what_it_says(grammar, text, not_this):
    assert accepts(grammar, text)
    assert not accepts(grammar, not_this)


def test_a_rule_that_is_given_twice_is_named():
    with pytest.raises(ValueError, match="'root' is given more than once"):
        gbnf.convert('root ::= "a"\nroot ::= "c"')


@pytest.mark.parametrize("text", [r"root ::= [\d]+", r'root ::= "a\w"', r"root ::= [\x4]"])
def test_an_escape_that_llama_cpp_refuses_is_no_letter(text):
    with pytest.raises(ValueError, match=r"the escape \\\w is none of GBNF"):
        gbnf.convert(text)


@pytest.mark.parametrize(
    "text", ['?start: a\na: "::="', 'start[lazy]: "::="', '// ::=\nstart: "x"']
)
def test_lark_is_not_taken_for_it(text):
    assert not gbnf.is_gbnf(text)
