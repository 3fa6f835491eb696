"""A trained model on the device: whether its texts are transformers', and how fast it writes them.

The model is a folder (`--model`), with a draft if there is one (`--draft`); without it the shipped
pair. Random weights say what a step costs; only trained ones say what drafts of it are worth.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import outrider
from gpu_stages.card import Card
from gpu_stages.plan import Failed, Item
from outrider import SamplingParams, Speculator, Stop, drafters, verifiers
from outrider.shipped import shipped
from outrider_lab.tasks.prompts import KINDS, tasks, token_ids

BATCHES = (1, 8, 24)
ARMS = ("plain", "lookup", "draft", "transformers", "transformers, prompt lookup")
#: Of the last answer's statistics: what explains a speed.
KEPT = (
    "mean_acceptance_length", "captures", "replays", "sizes", "predicted_ms", "measured_ms",
    "prefill_ms", "why_eager", "why_plain", "why_dropped",
)  # fmt: skip
#: What a token of ours may lack to transformers' best one: a near tie is one of both.
LACKS = 1e-2


class Loaded:
    """The model in one dtype: ours by arm, and transformers' own."""

    def __init__(self, card: Card, dtype: str) -> None:
        self.card = card
        options: dict[str, Any] = {"device": card.device, "dtype": dtype}
        self.draft = outrider.load(card.model, card.draft, **options)
        alone = card.model is not None and card.draft is None
        self.lookup = self.draft if alone else self.draft.using(drafters.Suffix())
        self.arms = {"plain": self.draft.plain(), "lookup": self.lookup}
        if not alone:
            self.arms["draft"] = self.draft
        theirs = AutoModelForCausalLM.from_pretrained(
            card.model or shipped("target"), dtype=dtype, trust_remote_code=False
        )
        self.theirs = theirs.to(card.device).eval()
        each = card.pick(4, 1)
        read = self.draft.tokenizer
        self.prompts = [(one.kind, token_ids(read, one.turns)) for one in tasks(each)]


def items(card: Card) -> list[Item]:
    """Texts first: a wrong one makes every figure behind it worthless."""
    held: dict[str, Loaded] = {}

    def model(dtype: str) -> Loaded:
        if dtype not in held:
            held.clear()
            card.free()
            held[dtype] = Loaded(card, dtype)
        return held[dtype]

    half = str(card.dtype).removeprefix("torch.")
    found = [
        Item("greedy texts, float32", lambda: greedy(model("float32")), 120),
        Item("seeded texts, float32", lambda: seeded(model("float32")), 120),
    ]
    for batch in card.pick(BATCHES, (1, 2)):
        for arm in ARMS if batch == 1 else ARMS[:-1]:
            found.append(_item(lambda: model(half), arm, batch))
    return found


def _item(model: Callable[[], Loaded], arm: str, batch: int) -> Item:
    return Item(f"{arm}, B={batch}", lambda: speed(model(), arm, batch), 120)


def greedy(loaded: Loaded) -> dict[str, Any]:
    """Of every arm: how many greedy texts are transformers', read with our text in one call."""
    told: dict[str, Any] = {}
    for name, speculator in loaded.arms.items():
        equal, worst = 0, 0.0
        for _, prompt in loaded.prompts:
            text = _text(speculator, prompt, SamplingParams(0), loaded.card.pick(64, 6))
            lacks = _lacking(loaded, prompt, text)
            equal, worst = equal + (lacks == 0), max(worst, lacks)
        told[name] = {"texts": len(loaded.prompts), "equal": equal, "most_lacking": worst}
        if worst > LACKS:
            raise Failed(f"{name}: a token lacks {worst:.2e} to transformers' best", told)
    return told


def _text(speculator: Speculator, prompt: list[int], law: SamplingParams, tokens: int) -> list[int]:
    return list(speculator.generate(prompt, law, Stop(tokens)).completions[0].token_ids)


def _lacking(loaded: Loaded, prompt: list[int], text: list[int]) -> float:
    """What the worst token of a text lacks to the best where it stands; 0: the greedy text."""
    ids = torch.tensor([[*prompt, *text]], device=loaded.card.device)
    with torch.inference_mode():
        logits: Tensor = loaded.theirs(ids).logits[0, len(prompt) - 1 : -1]
    taken = logits.gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return float((logits.max(-1).values - taken).max())


def seeded(loaded: Loaded) -> dict[str, Any]:
    """Drawn texts at T = 0.7 by shared noise: those of drafts are those of plain decoding."""
    told: dict[str, Any] = {}
    plain = loaded.draft.plain(shared_noise=True)
    drafting = {
        name: speculator.using(speculator.engine.drafter, verifiers.get("match"))
        for name, speculator in loaded.arms.items()
        if name != "plain"
    }
    for name, speculator in drafting.items():
        same = 0
        for seed, (_, prompt) in enumerate(loaded.prompts):
            law, tokens = SamplingParams(0.7, seed=seed), loaded.card.pick(64, 6)
            same += _text(speculator, prompt, law, tokens) == _text(plain, prompt, law, tokens)
        told[name] = {"texts": len(loaded.prompts), "equal": same}
    return told


def speed(loaded: Loaded, arm: str, batch: int) -> dict[str, Any]:
    """Tokens per second of all prompts in turn, so many at a time, by kind where each is alone.

    transformers writes one prompt of each kind alone, as it takes ten times as long.
    """
    tokens, size = loaded.card.pick(128, 6), {"arm": arm, "batch": batch}
    speculator = loaded.arms.get(arm)
    if speculator is None and not arm.startswith("transformers"):
        return size | {"absent": "no draft was given"}
    prompts = loaded.prompts if speculator or batch > 1 else loaded.prompts[: len(KINDS)]
    groups = [prompts[i : i + batch] for i in range(0, len(prompts), batch)]
    run = _ours(speculator, tokens) if speculator else _theirs(loaded, arm, tokens)
    for group in groups[:2]:
        run([prompt for _, prompt in group])  # compiles, captures, warms
    count, seconds, kinds = 0, 0.0, dict[str, list[float]]()
    told: dict[str, Any] = {}
    for group in groups:
        loaded.card.wait()
        start = time.perf_counter()
        made, told = run([prompt for _, prompt in group])
        loaded.card.wait()
        took = time.perf_counter() - start
        count, seconds = count + made, seconds + took
        if batch == 1:
            kinds.setdefault(group[0][0], []).append(made / took)
    by_kind = {kind: sum(each) / len(each) for kind, each in kinds.items()}
    return size | {"tokens_s": count / seconds, "new_tokens": count, "by_kind": by_kind} | told


Run = Callable[[list[list[int]]], tuple[int, dict[str, Any]]]


def _ours(speculator: Speculator, tokens: int) -> Run:
    def run(prompts: list[list[int]]) -> tuple[int, dict[str, Any]]:
        made = speculator.generate(prompts, SamplingParams(0), Stop(tokens, token_ids=()))
        return made.stats.new_tokens, {name: getattr(made.stats, name) for name in KEPT}

    return run


def _theirs(loaded: Loaded, arm: str, tokens: int) -> Run:
    """transformers' greedy text; shorter prompts are padded on the left."""
    more = {"prompt_lookup_num_tokens": 8} if arm.endswith("lookup") else {}

    def run(prompts: list[list[int]]) -> tuple[int, dict[str, Any]]:
        longest, device = max(map(len, prompts)), loaded.card.device
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in prompts], device=device)
        kept = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
        text = loaded.theirs.generate(
            ids, attention_mask=torch.tensor(kept, device=device), do_sample=False,
            max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0, **more,
        )  # fmt: skip
        return len(prompts) * (text.shape[1] - longest), {}

    return run
