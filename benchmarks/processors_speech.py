"""Whisper on one core beside faster-whisper: processes of their own that take turns.

    python -m venv peers && peers/bin/pip install faster-whisper
    python -m benchmarks.processors_speech --models models --ct2 FOLDER --peer peers/bin/python

`models` holds whisper-base and `speech` as for `benchmarks/recognition.py`; FOLDER is the same
checkpoint in CTranslate2's format. Greedy and five beams, temperature 0, English, no timestamps;
processor seconds for a minute of sound, word error rates, and whether speculation leaves a text as
it is. `OUTRIDER_ISA=avx2` and the other caps are for our side; CT2_FORCE_CPU_ISA=AVX2 caps theirs.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from benchmarks.processors import Worker

HERE = Path(__file__).parent
RATE = 16_000
WAYS = {"plain": {"drafter": "root"}, "speculative": {}}


def serve(asked: argparse.Namespace) -> None:
    """Our side: one process, every way of decoding one model that is asked for."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if asked.core >= 0:
        os.sched_setaffinity(0, {asked.core})
    import numpy as np

    import outrider

    folder = asked.models / asked.model
    started = time.process_time()
    ears = {}
    for name, more in WAYS.items():
        if name == "speculative" and asked.draft:
            more = {"draft": asked.draft}
        ears[name] = outrider.load(folder, dtype=asked.dtype, threads=1, **more)
    notes = ears["plain"].notes
    told = {"ready": time.process_time() - started, "dtype": notes.dtype, "means": notes.means}
    print(json.dumps(told), file=answers, flush=True)
    for line in sys.stdin:
        one = json.loads(line)
        samples = np.load(one["path"])
        more = {} if one["beams"] == 1 else {"beam_size": one["beams"]}
        started = time.process_time()
        done = ears[one["way"]].transcribe(
            samples, language="en", temperature=0, timestamps=False, **more
        )
        spent = time.process_time() - started
        parts = {"encoder": done.stats.encoder_ms / 1e3, "decoder": done.stats.decoder_ms / 1e3}
        print(json.dumps({"text": done.text, "cpu": spent, **parts}), file=answers, flush=True)


def main() -> None:
    """Read where models are, and which arms."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=Path, default=os.environ.get("OUTRIDER_MODELS"))
    parser.add_argument("--model", default="whisper-base")
    parser.add_argument("--draft", default="whisper-base-draft", help="ours; '' for none")
    parser.add_argument("--ct2", help="the same model in CTranslate2's format")
    parser.add_argument("--peer", default=sys.executable, help="a Python that has faster-whisper")
    parser.add_argument("--dtype", default="int8", help="of our side")
    parser.add_argument("--types", nargs="*", default=["int8", "float32"], help="of theirs")
    parser.add_argument("--count", type=int, default=10, help="recordings")
    parser.add_argument("--beams", nargs="*", type=int, default=[1, 5])
    parser.add_argument("--core", type=int, default=0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked)
        return
    if asked.models is None:
        parser.error("say where the models are: --models or OUTRIDER_MODELS")
    import numpy as np
    from training.whisper_recordings import asterisk, joined

    from outrider_lab.papers.score import word_errors

    recordings = list(joined(asterisk(asked.models / "speech", "en")))[: asked.count]
    minutes = sum(len(one.samples) for one in recordings) / RATE / 60
    mine = Worker([
        sys.executable, "-m", "benchmarks.processors_speech", "--serve", "--models",
        str(asked.models), "--model", asked.model, "--draft", asked.draft, "--dtype", asked.dtype,
        "--core", str(asked.core),
    ])  # fmt: skip
    theirs = {
        kind: Worker([asked.peer, str(HERE / "peers_whisper.py"), asked.ct2, kind, str(asked.core)])
        for kind in (asked.types if asked.ct2 else ())
    }
    print(f"{len(recordings)} recordings, {minutes:.2f} minutes; ours {mine.ready}")
    arms: dict[str, tuple[Worker, dict[str, Any]]] = {}
    for beams in asked.beams:
        for way in WAYS:
            arms[f"ours {asked.dtype} {way}, {beams}"] = mine, {"way": way, "beams": beams}
        for kind, worker in theirs.items():
            arms[f"faster-whisper {kind}, {beams}"] = worker, {"beams": beams}
    texts: dict[str, list[str]] = {name: [] for name in arms}
    cpu = dict.fromkeys(arms, 0.0)
    encoder = dict.fromkeys(arms, 0.0)
    with TemporaryDirectory() as folder:
        paths = []
        for number, one in enumerate(recordings):
            paths.append(str(Path(folder) / f"{number}.npy"))
            np.save(paths[-1], one.samples)
        for worker, what in arms.values():
            worker.ask(path=paths[-1], **what)  # warm
        for path in paths:
            for name, (worker, what) in arms.items():
                done = worker.ask(path=path, **what)
                texts[name].append(done["text"])
                cpu[name] += done["cpu"]
                encoder[name] += done.get("encoder", 0.0)
    rate = word_errors("en")
    for name in arms:
        wrong = rate(texts[name], [one.text for one in recordings])
        plain = name.replace("speculative", "plain")
        same = sum(a == b for a, b in zip(texts[name], texts.get(plain, texts[name]), strict=True))
        print(
            f"{name:32} {cpu[name] / minutes:6.2f} CPU s a minute "
            f"(encoder {encoder[name] / minutes:.2f}), WER {100 * wrong:.2f} %, "
            f"texts as plain {same} of {len(recordings)}"
        )
    for worker in (mine, *theirs.values()):
        worker.close()


if __name__ == "__main__":
    main()
