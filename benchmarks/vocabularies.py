"""A draft model with another tokenizer: what vocabularies share, and what is kept of its drafts.

    python benchmarks/vocabularies.py --target TARGET --draft DRAFT   # folders or hub names
    python benchmarks/vocabularies.py --reordered                     # the shipped pair

On one thread, over held-out code prompts, the same seeds for every drafter. Texts are compared in
float32; for speed take --dtype bfloat16, whose weights are packed.

    vocabulary  share of the target's tokens that the draft has, too
    text        the same of the tokens that the target alone writes
    kept        tokens per target call, of chains of --gamma tokens, or as the planner has it
    speed       processor time of plain decoding over that of the drafter

"same text" counts texts that equal plain decoding's, where they must: at temperature 0, and where
the rule is `match`. With --reordered the draft is the shipped one with its tokens in another order:
one law, so that its figures beside the shipped draft's show what the translation itself costs.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import outrider
from outrider import DraftModel, Root, SamplingParams, Stop
from outrider.drafters import StringMatch, Translated
from outrider.models.cross_tokenizer_model import TranslatedModel
from outrider.shipped import shipped
from outrider_lab.bench.prompts import read_prompts


def reordered(folder, to):
    """The same model whose tokens, the special ones left out, have their ids in reverse order."""
    words = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["id"] for token in words["added_tokens"]}
    vocab = words["model"]["vocab"]
    free = sorted(number for number in vocab.values() if number not in special)
    moved = dict(zip(free, reversed(free), strict=True)) | {number: number for number in special}
    words["model"]["vocab"] = {token: moved[number] for token, number in vocab.items()}
    model = AutoModelForCausalLM.from_pretrained(str(folder), trust_remote_code=False)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        order = torch.arange(len(table))
        order[list(moved.values())] = torch.tensor(list(moved))
        table.copy_(table[order])
        if not model.config.tie_word_embeddings:
            head = model.get_output_embeddings().weight
            head.copy_(head[order])
    model.save_pretrained(str(to))
    for name in ("tokenizer_config.json", "generation_config.json"):
        (Path(to) / name).write_bytes((Path(folder) / name).read_bytes())
    (Path(to) / "tokenizer.json").write_text(json.dumps(words), encoding="utf-8")
    return to


def drafters(model, count):
    """Name -> drafter and rule (None: the best for what it drafts)."""
    chain = (1,) * count
    if not isinstance(model, TranslatedModel):
        return {"draft_model, no translation": (DraftModel(model, chain), None)}
    return {
        "translated": (Translated(model, count), None),
        "string_match": (StringMatch(model, count), None),
        "draft_model": (DraftModel(model, chain), None),
        "draft_model, coupled": (DraftModel(model, chain, shared_noise=True), None),
    }


def measure(speculator, prompts, temperature, tokens):
    """Token ids, tokens per target call, processor seconds."""
    how = [SamplingParams(temperature, seed=number) for number in range(len(prompts))]
    started, texts, calls = time.thread_time(), [], 0
    for prompt, one in zip(prompts, how, strict=True):
        made = speculator.generate(prompt, one, Stop(tokens, (), ())).completions[0]
        texts.append(made.token_ids)
        calls += made.stats.steps
    return texts, sum(map(len, texts)) / calls, time.thread_time() - started


def report(pair, asked):
    """Print the figures of one pair."""
    prompts = read_prompts(asked.prompts, asked.count)
    model = pair.engine.drafter.model
    translated = isinstance(model, TranslatedModel)
    print(f"target {pair.notes.target}, draft {pair.notes.draft}")
    print(f"  vocabulary: {pair.notes.vocabulary or 'the same'}")
    for temperature in asked.temperature or [0.0, 1.0]:
        alone = pair.using(Root(), "match")
        plain, _, base = measure(alone, prompts, temperature, asked.tokens)
        print(f"  temperature {temperature:g}")
        if translated:
            common = {ours for ours, _ in model.translation.shared}
            ids = [number for text in plain for number in text]
            share = sum(number in common for number in ids) / len(ids)
            print(f"    text: {share:.1%} of its tokens are common")
        arms = {
            name: pair.using(drafter, rule)
            for name, (drafter, rule) in drafters(model, asked.gamma).items()
        }
        for name, speculator in {"as loaded, with planner": pair, **arms}.items():
            texts, kept, took = measure(speculator, prompts, temperature, asked.tokens)
            same = sum(one == other for one, other in zip(texts, plain, strict=True))
            print(
                f"    {name:28} kept {kept:.3f}  speed {base / took:.2f}  "
                f"same text {same} of {len(prompts)}",
                flush=True,
            )


def main() -> None:
    """One table per pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(shipped("target")))
    parser.add_argument("--draft")
    parser.add_argument("--reordered", action="store_true", help="the shipped pair, ids moved")
    parser.add_argument("--prompts", help="a file of prompts; default: held-out code")
    parser.add_argument("--count", type=int, default=12, help="prompts")
    parser.add_argument("--temperature", type=float, action="append")
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens")
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asked = parser.parse_args()
    how = {
        "dtype": asked.dtype,
        "threads": 1,
        "pack_weights": asked.dtype == "bfloat16",
    }
    if asked.draft is not None:
        report(outrider.load(asked.target, asked.draft, **how), asked)
    if asked.reordered or asked.draft is None:
        report(outrider.load(**how), asked)
        with tempfile.TemporaryDirectory() as folder:
            draft = reordered(shipped("draft"), folder)
            report(outrider.load(shipped("target"), draft, **how), asked)


if __name__ == "__main__":
    main()
