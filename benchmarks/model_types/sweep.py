"""Every type of transformers that writes text: a tiny random model of each, driven and compared.

    python benchmarks/model_types/sweep.py                     # all types, ten minutes on one core
    python benchmarks/model_types/sweep.py --types llama lfm2  # these alone; the others stay

Types that transformers opens as image-text models are given prompts with pictures, too
(`examine_images.py`). Writes `types.json` beside this file and docs/supported-models.md, and ends
with 1 where a line is not right and nobody has said why: its model is refused with a reason, or
`NOTES` has one. What the columns mean is in `examine.py`.
"""

import argparse
import json
import logging
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import examine_images
import torch
import transformers
from examine import examine, first_line
from model_type_record import (
    RECORD,
    causal,
    image_text,
    others,
    read_record,
    reason,
    reason_with_images,
    right,
    right_with_images,
)

PAGE = Path(__file__).parents[2] / "tests" / "models" / "supported_models.py"
LIMIT = 120  #: seconds of processor time that a type may take


def _late(*_):
    raise TimeoutError(f"more than {LIMIT} s")


def swept(kinds):
    """Findings by type; each is written to the terminal when it is there."""
    signal.signal(signal.SIGPROF, _late)
    found, every, seeing = {}, {*causal()}, {*image_text()}
    for kind in kinds:
        before = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, LIMIT)
        try:
            found[kind] = examine(kind)
        except Exception as error:
            found[kind] = {"built": first_line(error)}
        if kind in seeing:
            try:
                found[kind]["images"] = examine_images.examine(kind)
            except Exception as error:
                found[kind]["images"] = {"prompt": first_line(error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        found[kind]["causal"] = kind in every
        took = time.process_time() - before
        line = "right" if right(found[kind]) else reason(kind, found[kind]) or found[kind]
        if kind in seeing:
            line = f"{line}; with images: {reason_with_images(kind, found[kind]) or 'right'}"
        print(f"{kind:28} {took:5.1f} s  {line}", flush=True)
    return found


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", nargs="+", help="these types alone")
    parser.add_argument("--record", type=Path, default=RECORD, help="the file to write")
    asked = parser.parse_args(arguments)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    every = [*causal(), *others()]
    record = {"transformers": transformers.__version__, "types": {}}
    if asked.types and asked.record.is_file():
        record["types"] = read_record(asked.record)[0]
    record["types"] |= swept(asked.types or every)
    record["types"] = {kind: record["types"][kind] for kind in sorted(record["types"])}
    asked.record.write_text(json.dumps(record, separators=(",", ":")) + "\n", encoding="utf-8")
    if asked.record == RECORD:
        subprocess.run([sys.executable, str(PAGE)], check=True)
    open_ones = [
        kind
        for kind in every
        if not right(found := record["types"].get(kind, {})) and reason(kind, found) is None
    ]
    count = sum(right(record["types"].get(kind, {})) for kind in causal())
    print(f"{count} of {len(causal())} causal types load and are right")
    seen = sum(right_with_images(record["types"].get(kind, {})) for kind in image_text())
    print(f"{seen} of {len(image_text())} image-text types are right with images")
    for kind in open_ones:
        print(f"nobody has said why: {kind} {record['types'].get(kind)}")
    return bool(open_ones)


if __name__ == "__main__":
    sys.exit(main())
