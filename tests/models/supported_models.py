"""Writes docs/supported-models.md from the tables of the tests and the record of the sweep.

    python tests/models/supported_models.py              # the page alone
    python benchmarks/model_types/sweep.py               # the record, and then the page

tests/models/test_supported_models.py fails when the page and the tables differ.
"""

import sys
import textwrap
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "model_types"))

import model_type_record as sweep
import seq2seq_families
from families import EAGER_ONLY, FAMILIES
from supported_speech import FAMILIES as FAMILIES_OF_SPEECH, speech

from outrider.models import EXCEPTIONS, recurrent, seq2seq, unsupported

PAGE = Path(__file__).parents[2] / "docs" / "supported-models.md"

HEAD = """\
# Supported models

<!-- written by tests/models/supported_models.py; do not edit -->

Any decoder-only model of transformers that the check at load finds right, those whose layers keep a
state that are named below, and the encoder-decoders of the second table. What became of
[every type of transformers](#every-type-of-transformers) is in the tables at the end. The
decoder-only families of the first table are checked by `tests/models/test_families.py` on tiny
random models, in float32: scores of ragged trees (four rows, two rounds, beyond the sliding window
of 8) equal the model's own forward of each path within 1e-4, and coupled decoding with chains and
trees gives the text of plain coupled decoding.

    pytest tests/models/test_families.py

| family | model_type | masks and positions | attention |
|---|---|---|---|
"""

STATES = """
## Models whose layers keep a state

Short convolutions and recurrences: trees are exact by a log of what each node adds to a state. The
types are checked by `tests/models/test_recurrent.py` on tiny random models, in float32: scores of
trees, over texts read in parts and after paths of unequal lengths were kept, equal transformers'
own token by token within 1e-4 of the largest logit; greedy texts equal `generate`; and seeded
texts are the same for every drafter, alone and beside rows that come and go.

    pytest tests/models/test_recurrent.py -m "slow or not slow"

{states}
"""

SECOND = """
## Encoder-decoders

Text, audio and images to text. An encoder reads each source once; cross-attention keys and values
are made once per row and owned by the cache, whatever the drafter does. The families are checked by
`tests/models/test_seq2seq.py` on tiny random models, in float32: while rows with sources of
different lengths join, leave and are replaced, and accepted paths are kept, scores of trees equal
the model's own forward of each path within 1e-5 of the largest logit. Without what the adapter does
for positions they differ by more than 1e-2.

    pytest tests/models/test_seq2seq.py

| family | model_type | decoder positions | attention |
|---|---|---|---|
"""

THIRD = """
The decoder of a composite (`encoder-decoder`, `vision-encoder-decoder`) is one of
{decoders}.

**Decoders alone** attend to the states of the target's encoder and are drafts for it:
{alone}.
As a target such a model is refused: it has no encoder to make the states.

**Drafts.** `load(target, draft)` compares the two encoders. If they are equal (models distilled
with a frozen encoder have it so) the draft attends to the target's states and only one encoder
runs; `share_encoder=True` does that for unequal encoders of one width, `share_encoder=False` never.
`speculator.notes.encoder` and `--verbose` say which it is. A draft with an encoder of its own reads
the source itself, or `Inputs.draft` where it takes something else (Whispers with 80 and with 128
mel channels).

**Sources** are checked when a request comes: their kind, shape and token ids, and that they are not
longer than the encoder's positions. Audio of different lengths is read in groups of one length:
padding would get into the convolutions. What a text is conditioned on so never depends on its
neighbours in the batch.
"""

MIDDLE = """
Llama, Mistral, Qwen2 and Qwen3 without sliding windows run through a lean decoder of our own, on a
CPU and on CUDA; Whisper and BART's kind do on a CPU. Other families run through transformers'
forward.

## What is checked when you load

- **A decoder-only model type that is not in the table** is tried in the same way: trees of two
  ragged rows are compared with the model's own forward, windows narrowed for the moment so that a
  short text reaches past them. If trees differ, the **chain fallback** is tried (one row at a time,
  the model's own mask); a target that scores chains only refuses drafters that branch. If that
  differs too, the model is refused. The same check guards every family of both tables.
- **Quantised weights** are honoured when scores do not depend on what else is in the call: layers
  that round weights only (4-bit, 8-bit without outlier columns) pass the check. LLM.int8 with
  outlier columns is refused by name, and anything that fails the check is refused with its
  difference.
- **Attention back-ends** other than `eager` and `sdpa` take no tree mask and are refused: load the
  model with `attn_implementation="sdpa"`.
- **device_map**: a model runs on one device, and what does not fit there may be on "cpu" or "disk"
  (weights are fetched for each call: nothing is packed, and heads are refused); several devices are
  refused.

## Refused by name

| model_type | reason |
|---|---|
"""

TAIL = """
Also refused: any other model with layer types than full, sliding, chunked and indexed attention,
any other model that transformers marks as stateful, and encoder-decoders of a family that is not in
the table: no one has tried them.

{sweep}
## On a CUDA device

The families and `model.generate` are tested there with
`pytest -m gpu tests/models tests/integrations`; without a device these tests skip.
"""


SWEEP = """\
## Every type of transformers

One tiny random model of each of the {count} causal types that transformers {version} has, in
float32 on a CPU: **{right} load and are right**, {chains} of them with chains alone. One command
writes these tables, and fails where transformers has a type that nobody has looked at:

    python benchmarks/model_types/sweep.py

*Folder*: it loads from a folder, with the same text. *Plain*: greedy text equals transformers'
`generate`. *Chain*, *tree*: so it is with drafts, a part of which is wrong. *Batch*: prompts of 61,
1 and 5 tokens in one drafted batch have the texts that each has alone. *Seeded*: so they have at
temperature 0.9. Random weights alone were tried, most types with no trained model; what it is worth
drafting for is not said here.

| model_type | folder | plain | chain | tree | batch | seeded |
|---|---|---|---|---|---|---|
{lines}
Of the RoBERTa kin and XMOD *plain* is the model's own forward: transformers' `generate` gives it
positions from 0, where it counts from behind the padding id by itself, as it was trained.

The other {wrong}:

| model_type | what happens | reason |
|---|---|---|
{reasons}
### With images, sounds and encoders

The {other_count} types that transformers opens by another class than the causal one, given text
alone (an encoder-decoder: a made-up source): **{other_right} load and are right**, from a folder
and as objects.

{other_names}

The other {other_wrong}; where there is *no tiny model*, because no small configuration is valid or
a package is not there, nothing is said of the type:

| model_type | what happens | reason |
|---|---|---|
{other_reasons}
### With pictures in the prompt

Of the {seeing_count} types that transformers opens as image-text models **{seeing_right} are right
with pictures in their prompts**: greedy texts behind three unequal pictures equal transformers'
`generate`, drafted in chains and in trees they are the same, so they are in one batch with a text
that has no picture, and seeded texts are those of each prompt alone. The same command looks, and
fails where a type is new (`benchmarks/model_types/examine_images.py`).

{seeing_names}

The other {seeing_wrong}:

| model_type | reason |
|---|---|
{seeing_reasons}"""

_MARKS = {True: "yes", "chains only": "chains only"}


def _happens(found) -> str:
    """What a line that is not right comes to, in a few words."""
    if "built" in found:
        return "no tiny model"
    if found["loads"] is not True:
        return "refused"
    return "; ".join(f"{arm}: {found[arm]}" for arm in sweep.ARMS if found.get(arm) is not True)


def _reasons(kinds, record) -> str:
    """Rows of the types that are not right."""
    rows = [
        f"| `{kind}` | {_happens(record[kind])} | {sweep.reason(kind, record[kind])} |\n"
        for kind in kinds
        if not sweep.right(record[kind])
    ]
    return "".join(rows)


def _wrapped(kinds) -> str:
    """Names in lines of a page."""
    return "\n".join(textwrap.wrap(", ".join(f"`{kind}`" for kind in kinds) + ".", 100))


def every_type() -> str:
    """The section on all types of transformers."""
    record, version = sweep.read_record()
    causal = [kind for kind in record if record[kind]["causal"]]
    others = [kind for kind in record if not record[kind]["causal"]]
    right, beside = (
        [kind for kind in some if sweep.right(record[kind])] for some in (causal, others)
    )
    seeing = sweep.image_text()
    see = [kind for kind in seeing if sweep.right_with_images(record[kind])]
    blind = [
        f"| `{kind}` | {sweep.reason_with_images(kind, record[kind])} |\n"
        for kind in seeing
        if kind not in see
    ]
    lines = [
        f"| `{kind}` | {' | '.join(_MARKS[record[kind][arm]] for arm in sweep.ARMS)} |\n"
        for kind in right
    ]
    return SWEEP.format(
        count=len(causal),
        version=version,
        right=len(right),
        chains=sum(record[kind]["tree"] == "chains only" for kind in right),
        lines="".join(lines),
        wrong=len(causal) - len(right),
        reasons=_reasons(causal, record),
        other_count=len(others),
        other_right=len(beside),
        other_names=_wrapped(beside),
        other_wrong=len(others) - len(beside),
        other_reasons=_reasons(others, record),
        seeing_count=len(seeing),
        seeing_right=len(see),
        seeing_names=_wrapped(see),
        seeing_wrong=len(blind),
        seeing_reasons="".join(blind),
    )


def special(config) -> str:
    """What the adapter does for this configuration, in a few words."""
    kind = config.model_type
    kinds = set(getattr(config, "layer_types", None) or ())
    if kind in EXCEPTIONS and not (kind == "falcon" and not config.alibi):
        return {
            "gpt_neo": "local window by position, in place of a table by slot",
        }.get(kind, "ALiBi bias by key position")
    if kinds - {"full_attention"}:
        names = sorted(k.removesuffix("_attention") for k in kinds)
        return f"one mask for each layer type: {', '.join(names)}"
    if getattr(config, "sliding_window", None):
        return "one windowed mask, by position"
    if kind in ("gpt2", "opt", "gpt_bigcode", "biogpt", "xglm"):
        return "plain mask; positions of its own embedding"
    return "plain mask"


def positions(name, config) -> str:
    """How an encoder-decoder's decoder is told positions."""
    if config.model_type in ("t5", "mt5", "umt5", "longt5"):
        return "bias by distance, from its own table"
    kind = config.decoder.model_type if seq2seq.composed(config) else config.model_type
    if kind in ("roberta", "xlm-roberta"):
        return "by argument, counted from behind the padding id"
    if kind in ("t5gemma", "t5gemma2"):
        return "by argument; windows by position"
    if kind in (*FAMILIES_OF_SPEECH, "bert", "bert-generation", "blip", "gpt2") and kind not in (
        "speech_to_text",
        "speecht5",
    ):
        return "by argument"
    return "its own embedding, read by position"


def encoder_decoders() -> str:
    """The section on encoder-decoders."""
    lines = []
    for name, made in sorted(seq2seq_families.FAMILIES.items(), key=lambda item: item[0].lower()):
        config = made()
        attention = ", ".join(seq2seq_families.attentions(name))
        row = f"| {name} | `{config.model_type}` | {positions(name, config)} | {attention} |\n"
        lines.append(row)
    decoders = ", ".join(f"`{kind}`" for kind in sorted(seq2seq.DECODERS))
    alone = ", ".join(f"`{kind}`" for kind in sorted(seq2seq_families.DECODERS))
    decoders, alone = ("\n".join(textwrap.wrap(text, 100)) for text in (decoders, alone))
    return SECOND + "".join(lines) + THIRD.format(decoders=decoders, alone=alone)


def document() -> str:
    """The whole page."""
    lines = []
    for name in sorted(FAMILIES, key=str.lower):
        config = FAMILIES[name]()
        attention = "eager" if name in EAGER_ONLY else "eager, sdpa"
        lines.append(f"| {name} | `{config.model_type}` | {special(config)} | {attention} |\n")
    reasons = [f"| `{kind}` | {why} |\n" for kind, why in sorted(unsupported.REASONS.items())]
    states = ", ".join(f"`{kind}`" for kind in sorted(recurrent.FAMILIES))
    states = STATES.format(states="\n".join(textwrap.wrap(f"Types: {states}.", 100)))
    tail = TAIL.format(sweep=f"{every_type()}\n{speech()}")
    parts = HEAD, *lines, states, encoder_decoders(), MIDDLE, *reasons, tail
    return "".join(parts)


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(document(), encoding="utf-8")
