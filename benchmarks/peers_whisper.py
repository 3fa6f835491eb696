"""faster-whisper as a process of its own that answers line by line: run by `processors_speech.py`.

Its Python needs the package faster-whisper and nothing of ours. Each line in names a sound file
(`path`, float32 samples of 16 kHz as numpy keeps them) and `beams`; each line out has `text` and
the processor seconds of the whole process, `cpu`.
"""

import json
import os
import sys
import time


def main() -> None:
    """Serve standard input with a model's folder, a type and a core (-1: any)."""
    folder, kind, core = sys.argv[1], sys.argv[2], int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if core >= 0:
        os.sched_setaffinity(0, {core})
    import numpy as np
    from faster_whisper import WhisperModel

    started = time.process_time()
    model = WhisperModel(folder, device="cpu", compute_type=kind, cpu_threads=1)
    print(json.dumps({"ready": time.process_time() - started}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        samples = np.load(asked["path"])
        started = time.process_time()
        parts, _ = model.transcribe(
            samples,
            language="en",
            beam_size=asked["beams"],
            temperature=0,
            without_timestamps=True,
            condition_on_previous_text=False,
        )
        text = " ".join(part.text.strip() for part in parts)
        spent = time.process_time() - started
        print(json.dumps({"text": text, "cpu": spent}), file=answers, flush=True)


if __name__ == "__main__":
    main()
