"""Writes docs/supported-models.md from the tables of the tests.

    python tests/models/supported_models.py

tests/models/test_supported_models.py fails when the page and the tables differ.
"""

from pathlib import Path

from families import EAGER_ONLY, FAMILIES

from outrider.models import EXCEPTIONS, refusals

PAGE = Path(__file__).parents[2] / "docs" / "supported-models.md"

HEAD = """\
# Supported models

<!-- written by tests/models/supported_models.py; do not edit -->

Any decoder-only model of transformers whose layers are all attention. The families below are
checked by `tests/models/test_families.py` on tiny random models, in float32: scores of ragged trees
(four rows, two rounds, beyond the sliding window of 8) equal the model's own forward of each path
within 1e-4, and coupled decoding with chains and trees gives the text of plain coupled decoding.

    pytest tests/models/test_families.py

| family | model_type | masks and positions | attention |
|---|---|---|---|
"""

MIDDLE = """
On a CPU, Llama checkpoints run through a lean decoder of our own; everything else, and every model
on CUDA, runs through the model's own forward.

## What is checked when you load

- **A model type that is not in the table** is tried in the same way: trees of two ragged rows are
  compared with the model's own forward, windows narrowed for the moment so that a short text
  reaches past them. If trees differ, the **chain fallback** is tried (one row at a time, the
  model's own mask); a target that scores chains only refuses drafters that branch. If that differs
  too, the model is refused. The same check guards every family of the table.
- **Quantised weights** are honoured when scores do not depend on what else is in the call: layers
  that round weights only (4-bit, 8-bit without outlier columns) pass the check. LLM.int8 with
  outlier columns is refused by name, and anything that fails the check is refused with its
  difference.
- **Attention back-ends** other than `eager` and `sdpa` take no tree mask and are refused: load the
  model with `attn_implementation="sdpa"`.
- **device_map** over one device is fine; a model spread over several devices is refused.

## Refused by name

| model_type | reason |
|---|---|
"""

TAIL = """
Also refused: any model with layer types other than full, sliding and chunked attention, any model
that transformers marks as stateful, and encoder-decoders.

## On a CUDA device

The families and `model.generate` are tested there with
`pytest -m gpu tests/models tests/integrations`; without a device these tests skip.
"""


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


def document() -> str:
    """The whole page."""
    lines = []
    for name in sorted(FAMILIES, key=str.lower):
        config = FAMILIES[name]()
        attention = "eager" if name in EAGER_ONLY else "eager, sdpa"
        lines.append(f"| {name} | `{config.model_type}` | {special(config)} | {attention} |\n")
    reasons = [f"| `{kind}` | {why} |\n" for kind, why in sorted(refusals.REASONS.items())]
    return HEAD + "".join(lines) + MIDDLE + "".join(reasons) + TAIL


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(document(), encoding="utf-8")
