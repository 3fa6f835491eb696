"""Whatever the OpenAPI description of a running server allows or forbids: no answer is a 5xx.

    outrider serve --model MODEL --port 8141 --max-model-len 256 &
    python benchmarks/described.py http://127.0.0.1:8141 --examples 1000

Runs schemathesis (pip install schemathesis), with this file as its hooks: where a body names a
model, it names the one that is served, few tokens are asked for, and every other body has but one
of its fields beside those that are answered: so requests come to the engine. A request's own
`timeout` is left out: what it answers is a 504. Its summary counts the cases; the exit code is 1
if a check failed.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from loopback import past_proxies

MODEL = "OUTRIDER_SERVED_MODEL"
MOST_TOKENS = 16
TURNS = [{"role": "user", "content": "Name a colour."}]
#: Bodies that are answered.
KNOWN = {
    "/v1/completions": {"model": "", "prompt": "def f(x):", "max_tokens": 4},
    "/v1/chat/completions": {"model": "", "messages": TURNS, "max_tokens": 4},
    "/v1/responses": {"model": "", "input": "Name a colour.", "max_output_tokens": 16},
    "/tokenize": {"prompt": "def f(x):"},
    "/detokenize": {"tokens": [40, 41]},
}

if MODEL in os.environ:  # as schemathesis imports it
    import schemathesis

    NUMBERS = itertools.count()

    @schemathesis.hook
    def before_call(context, case, kwargs):
        """Bodies of what is answered, with one drawn field, every other time; few tokens."""
        body, number = case.body, next(NUMBERS)
        if not isinstance(body, dict):
            return
        known = KNOWN.get(case.operation.path, {})
        if known and number % 2:
            drawn = sorted(body.keys() - known)
            one = drawn[number // 2 % len(drawn)] if drawn else None
            body = case.body = known | {name: body[name] for name in drawn if name == one}
        body.pop("timeout", None)  # a deadline that is over is a 504, as it should be
        if isinstance(body.get("model"), str):
            body["model"] = os.environ[MODEL]
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            if type(body.get(name)) is int and body[name] > MOST_TOKENS:
                body[name] %= MOST_TOKENS


def main():
    past_proxies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="for example http://127.0.0.1:8000")
    parser.add_argument("--examples", type=int, default=1000, help="of each operation")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--phases", default="coverage,fuzzing")
    parser.add_argument("--seconds", type=int, help="end then, and tell how many cases there were")
    asked = parser.parse_args()
    with urllib.request.urlopen(asked.server + "/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    own = {MODEL: model, "SCHEMATHESIS_HOOKS": Path(__file__).stem}
    own["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    beside = Path(sys.executable).with_name("schemathesis")  # no environment need be activated
    order = [str(beside) if beside.exists() else "schemathesis", "run"]
    order += [asked.server + "/openapi.json"]
    order += ["--checks", "not_a_server_error", "--phases", asked.phases, "--seed", "1"]
    order += ["--suppress-health-check", "all", "--warnings", "off", "--request-timeout", "600"]
    order += ["--max-examples", str(asked.examples), "--workers", str(asked.workers)]
    order += ["--continue-on-failure"] + (
        ["--max-time", str(asked.seconds)] if asked.seconds else []
    )
    return subprocess.run(order, env=os.environ | own).returncode


if __name__ == "__main__":
    sys.exit(main())
