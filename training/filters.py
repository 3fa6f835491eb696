"""Text that is worth learning from: code written by people, not tables written by programs."""

from __future__ import annotations

import re

GENERATED = re.compile(
    r"^encodings/(?!__init__|aliases|utf_8\.py|idna|punycode|base64_codec|hex_codec|rot_13|undef)"
    r"|^pydoc_data|topics\.py$|cjkencodings|bad_?coding|badsyntax|bad_code|_sysconfigdata"
    r"|^test/test_unicode_identifiers|keycodes|stringprep\.py|html/entities\.py|^test/.*_data/"
    r"|test_generated_cases|test_patma|re_tests\.py|(^|/)sre_|tokenizedata|config-"
    r"|^idlelib/idle_test/example|^test/test_email/.*codecs|lib2to3/tests/data"
    r"|(^|/)(site-packages|ensurepip|turtledemo|_vendor|vendored|__pycache__)/"
)


def tidy(text: str) -> str:
    """Tabs to eight spaces, Unix line ends, no trailing blanks."""
    text = text.replace("\t", " " * 8).replace("\r", "").replace("\f", "")
    return "\n".join(line.rstrip() for line in text.split("\n"))


def is_worth_learning(path: str, text: str) -> bool:
    """Refuse tables, data and near-empty files, by name and by what they are made of."""
    if GENERATED.search(path) or len(text) < 120:
        return False
    size = len(text)
    if max(map(len, text.split("\n"))) > 400:
        return False
    foreign = sum(ord(c) > 127 for c in text) / size
    digits = sum(c.isdigit() for c in text) / size
    escapes = 4 * len(re.findall(r"\\x[0-9a-f]{2}", text)) / size
    return foreign <= 0.02 and digits <= 0.12 and escapes <= 0.06
