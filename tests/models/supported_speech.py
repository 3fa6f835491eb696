"""The table of speech-to-text types in docs/supported-models.md, from the record of their sweep."""

import json
from pathlib import Path

RECORD = Path(__file__).parents[2] / "benchmarks" / "model_types" / "speech.json"
ARMS = ("plain", "chain", "tree", "batch", "seeded")
#: Encoder-decoders by their family in seq2seq_families.py.
FAMILIES = {
    "canary": "Canary",
    "cohere_asr": "Cohere ASR",
    "kyutai_speech_to_text": "Kyutai STT",
    "moonshine": "Moonshine",
    "moonshine_streaming": "Moonshine (streaming)",
    "seamless_m4t": "SeamlessM4T (speech)",
    "seamless_m4t_v2": "SeamlessM4T v2 (speech)",
    "speech-encoder-decoder": "wav2vec 2.0 to BART",
    "speech_to_text": "Speech2Text",
    "speecht5": "SpeechT5",
    "voxtral_realtime": "Voxtral Realtime",
    "whisper": "Whisper",
}
#: Why a type is neither right nor refused at load: found out by hand.
NOTES = {
    "vibevoice_asr": "its encoder draws noise at every call, so a recording is never read twice "
    "alike; such prompts are refused, prompts of text alone are right",
}
_SHOWN = {True: "yes", "chains only": "chains only"}

SECTION = """\
### Speech

The {count} types that transformers {version} opens as speech to text, or that hear recordings in
prompts, and the Parakeet kin; of those that are driven a tiny random model hears unequal
recordings: **{right} are right**. *Plain*: greedy texts equal transformers' `generate` with the
same recordings; the other columns as above, with recordings, and a text without any, in one batch.
One command writes this table:

    python benchmarks/model_types/speech_types.py

| model_type | reads a recording as | plain | chain | tree | batch | seeded |
|---|---|---|---|---|---|---|
{lines}
The other {wrong}:

| model_type | reason |
|---|---|
{reasons}"""


def right(found):
    """Whether a type is right, with trees or with chains alone."""
    each = [found.get(arm) for arm in ARMS]
    return all(one is True or one == "chains only" for one in each)


def speech():
    """The section."""
    record = json.loads(RECORD.read_text("utf-8"))
    types = record["types"]
    good = [kind for kind in types if right(types[kind])]
    lines = ""
    for kind in good:
        place = "source" if kind in FAMILIES else "part of a prompt"
        shown = " | ".join(_SHOWN[types[kind][arm]] for arm in ARMS)
        lines += f"| `{kind}` | {place} | {shown} |\n"
    wrong = [kind for kind in types if kind not in good]
    reasons = ""
    for kind in wrong:
        said = str(types[kind].get("loads", types[kind].get("built")))
        said = said.split(" models are not supported: ")[-1].split("; got ")[0]
        reasons += f"| `{kind}` | {NOTES.get(kind, said)} |\n"
    return SECTION.format(
        count=len(types),
        version=record["transformers"],
        right=len(good),
        lines=lines,
        wrong=len(wrong),
        reasons=reasons,
    )
