"""Every speech-to-text type of transformers: a tiny random model of each hears recordings.

    python benchmarks/model_types/speech_types.py            # all, two minutes on one core
    python benchmarks/model_types/speech_types.py canary     # this one; others stay

Writes `speech.json` beside this file and docs/supported-models.md, and ends with 1 where a type is
neither right nor refused. By arms, with unequal recordings in prompts or as sources:

    plain    greedy texts equal transformers' own `generate`
    chain    drafted in chains of four, every third token of which is wrong: the same texts
    tree     the same with two wrong siblings beside each right token
    batch    all recordings, and a text without any where the model reads prompts, in one drafted
             batch: the texts of each alone
    seeded   in that batch at temperature 0.9: the texts that each has alone, undrafted
"""

import json
import logging
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

sys.path.append(str(Path(__file__).parents[2] / "tests" / "models"))

import media_models as sounds
from examine import Recited, attempted, first_line, same
from source_models import read_as_sources
from supported_speech import FAMILIES, NOTES, RECORD, right

from outrider import verifiers
from outrider.drafters import Root
from outrider.engine.engine import Engine
from outrider.engine.request import StopConditions
from outrider.models import adapt
from outrider.models.config import placeholders
from outrider.models.unsupported import check_config
from outrider.sampling.sampling_params import SamplingParams
from outrider.types import MultiModalInputs

PAGE = Path(__file__).parents[2] / "tests" / "models" / "supported_models.py"
NEW = 12
WORDS = [7, 9, 11, 13]  #: a prompt of text alone


def every():
    """Types opened as speech to text or as transducers, and others that hear in prompts."""
    names = ("SPEECH_SEQ_2_SEQ", "RNNT", "TDT")
    tables = (getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}) for name in names)
    opened = {kind for table in tables for kind in table}
    return sorted({*opened, *sounds.AUDIO, *sounds.NOISY, "parakeet_ctc"})


@torch.inference_mode()
def generated(model, **given):
    """What transformers writes, greedily."""
    found = model.generate(
        **given,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, -NEW:].tolist()


def heard_in_prompts(kind):
    """A model, its prompts with recordings, what is beside them, and transformers' texts."""
    model = sounds.made(kind)
    made = [sounds.prompt(kind, model, seed, 2 + 3 * seed, size=seed % 2) for seed in range(3)]
    stands = placeholders(model.config)
    texts, beside = [], []
    for ids, kwargs in [*made, (WORDS, {})]:
        ids_1L = torch.tensor([ids])
        seen = torch.ones_like(ids_1L)
        texts.append(generated(model, input_ids=ids_1L, attention_mask=seen, **kwargs))
        beside.append(MultiModalInputs(kwargs, stands) if kwargs else None)
    return model, [ids for ids, _ in made] + [WORDS], beside, texts


def examine(kind):
    """The findings on a type, by arm; "loads" alone for one that is refused."""
    if kind in FAMILIES:
        model, prompts, beside, right = read_as_sources(
            FAMILIES[kind], generated, own_reader=kind == "whisper"
        )
    elif kind in {**sounds.AUDIO, **sounds.NOISY}:
        model, prompts, beside, right = heard_in_prompts(kind)
    else:
        return {"loads": refused(kind)}
    target = adapt(model)

    def texts(drafter, params, rows):
        engine = Engine(target, drafter, verifiers.get("match"))
        given = [beside[row] for row in rows]
        run = engine.run(
            [prompts[row] for row in rows],
            [params[row] for row in rows],
            StopConditions(NEW),
            inputs=given if any(given) else None,
        )
        out = [[] for _ in rows]
        for block in run:
            out[block.request_id] += block.token_ids
        return out

    every_row = range(len(prompts))

    def alone(drafter, params):
        return [texts(drafter(), params, [row])[0] for row in every_row]

    def known(some, width):
        return Recited([[*a, *b] for a, b in zip(prompts, some, strict=True)], width)

    greedy = [SamplingParams(0)] * len(prompts)
    found = {"loads": True, "plain": attempted(lambda: same(alone(Root, greedy), right))}
    if found["plain"] is not True:
        return found
    width = 3 if target.trees else 1
    found["chain"] = attempted(lambda: same(alone(lambda: known(right, 1), greedy), right))
    found["tree"] = "chains only"
    if target.trees:
        found["tree"] = attempted(lambda: same(alone(lambda: known(right, 3), greedy), right))
    found["batch"] = attempted(lambda: same(texts(known(right, width), greedy, every_row), right))
    drawn = [SamplingParams(0.9, seed=5 + row) for row in every_row]

    def seeded():
        plain = alone(Root, drawn)
        return same(texts(known(plain, width), drawn, every_row), plain)

    found["seeded"] = attempted(seeded)
    return found


def refused(kind):
    """What is said of a type that nobody drives."""
    config = transformers.AutoConfig.for_model(kind)
    said = attempted(lambda: check_config(config))
    return said if isinstance(said, str) else "nobody has said why"


def main():
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text("utf-8"))["types"] if sys.argv[1:] else {}
    for kind in sys.argv[1:] or every():
        try:
            record[kind] = examine(kind)
        except Exception as error:
            record[kind] = {"built": first_line(error)}
        said = "right" if right(record[kind]) else record[kind]
        print(f"{kind:24} {said}", flush=True)
    record = {kind: record[kind] for kind in sorted(record)}
    about = {"transformers": transformers.__version__, "types": record}
    RECORD.write_text(json.dumps(about, separators=(",", ":")) + "\n", encoding="utf-8")
    subprocess.run([sys.executable, str(PAGE)], check=True)
    strange = [
        kind
        for kind, found in record.items()
        if not right(found)
        and kind not in NOTES
        and not str(found.get("loads")).startswith("UnsupportedModel")
    ]
    return bool(strange)


if __name__ == "__main__":
    sys.exit(main())
