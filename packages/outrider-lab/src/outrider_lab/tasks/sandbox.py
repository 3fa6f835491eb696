"""Tests of code that a model wrote, in a process of its own with little to break.

The process has no environment, an empty folder, two seconds, 1 GiB, and no right to write a file,
to open a connection or to start a program: an audit hook refuses these, which nothing written in
Python takes back. It is a fence against accidents, as models write them, and not against attacks.
"""

import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence

_MEMORY = 1 << 30
#: Reads code, tests, a word and seconds, Python literals, from its standard input; the word is its
#: last line if all tests are true. Code that ends the process has not passed.
_RUNNER = f"""
import ast, resource, sys
code, tests, word, seconds = ast.literal_eval(sys.stdin.read())
for what, most in ((resource.RLIMIT_CPU, seconds), (resource.RLIMIT_AS, {_MEMORY}),
                   (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(what, (most, most))
refused = ("socket.", "subprocess.", "os.", "shutil.", "ctypes.", "pty.", "fcntl.", "urllib.")
def refuse(event, given):
    writes = event == "open" and set(str(given[1])) & set("wax+")
    if writes or event.startswith(refused) and event not in ("os.listdir", "os.scandir"):
        raise PermissionError(event)
sys.addaudithook(refuse)
names = {{"__name__": "answer"}}
exec(compile(code, "answer", "exec"), names)
if all(eval(test, names) for test in tests):
    sys.__stdout__.write("\\n" + word)
"""


def passes(code: str, tests: Sequence[str], seconds: int = 2) -> bool:
    """Whether code runs and all tests, Python expressions, are true of what it defines.

    >>> passes("def one(): return 1", ["one() == 1"]), passes("def one(): return 2", ["one() == 1"])
    (True, False)
    """
    word = secrets.token_hex()
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER],
                input=repr((code, list(tests), word, seconds)).encode("utf-8", "replace"),
                capture_output=True,
                cwd=folder,
                env={},
                timeout=5 * seconds,
            )
        except subprocess.TimeoutExpired:
            return False
    return done.stdout.endswith(b"\n" + word.encode())
