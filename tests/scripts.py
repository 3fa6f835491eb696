"""A benchmark's script in another environment, for tests of what is not installed in this one."""

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = [ROOT / "packages" / f"outrider-{name}" / "src" for name in ("lab", "ray", "vllm")]
SOURCES = os.pathsep.join(map(str, (ROOT / "src", *PACKAGES)))


def run(python, script, *words):
    """The JSON of its last line."""
    done = subprocess.run(
        [str(word) for word in (python, ROOT / "benchmarks" / script, *words)],
        env=os.environ | {"PYTHONPATH": SOURCES, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
