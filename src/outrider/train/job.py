"""A whole training: texts and answers in, a draft folder with its card out.

    OUT/work/answers.jsonl     the target's answers, written as they come
    OUT/work/features/         what the target made of the texts (`features`)
    OUT/work/state.pt          the checkpoint (`loop`)
    OUT/*                      the draft, readable by `load(draft=OUT)`, and its README.md

Whatever is there of an interrupted run is gone on with; `work` may be deleted when it is done.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.errors import ConfigurationError
from outrider.models import layer_subset, reads_more
from outrider.models.config import vocabulary_of
from outrider.models.layer_subset import check, depth
from outrider.models.sources import ModelSource
from outrider.sampling.sampling_params import SamplingParams
from outrider.text.output_text import Stop
from outrider.text.prompts import encode
from outrider.text.speculator import Speculator
from outrider.train import texts
from outrider.train.features import Alpha, Features, TrainText, alpha, read, record
from outrider.train.students import HeadStudent, LayerStudent, Student, usual_aux_layers
from outrider.train.task import Task
from outrider.train.texts import TextPiece
from outrider.train.trainer import Losses, Progress, Trainer

# The target's own answers to prompts: what a draft has to foresee is what the target writes.

#: Temperatures of answers in turn: as people use models, and once as it is.
TEMPERATURES = (0.0, 0.7, 0.0, 0.7, 1.0)


def answered(
    speculator: Speculator,
    prompts: Sequence[TextPiece],
    path: Path,
    *,
    tokens: int = 224,
    rows: int = 16,
    seed: int = 0,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[TrainText, bool | None]]:
    """Answers of up to so many tokens, each with whether it is held out.

    They are written to `path` as they come, a JSON object a line; those that are there already
    from a run that was stopped are read. Raises ConfigurationError for answers to other prompts.
    """
    done = _read(path)
    _check(speculator, prompts, [text for text, _ in done], path)
    with path.open("a", encoding="utf-8") as file:
        for first in range(len(done), len(prompts), rows):
            numbers = range(first, min(first + rows, len(prompts)))
            ids = [_prompt(speculator, prompts[number].prompt) for number in numbers]
            settings = [
                SamplingParams(TEMPERATURES[n % len(TEMPERATURES)], seed=seed + n) for n in numbers
            ]
            made = speculator.generate(ids, settings, Stop(tokens))
            for number, prompt, completion in zip(numbers, ids, made.completions, strict=True):
                text = TrainText((*prompt, *completion.token_ids), len(prompt))
                done.append((text, prompts[number].held_out))
                row = {"start": text.start, "held_out": done[-1][1], "tokens": text.tokens}
                file.write(json.dumps(row) + "\n")
            file.flush()
            show(len(done), len(prompts))
    return [(text, held) for text, held in done if len(text.tokens) > text.start + 8]


def _prompt(speculator: Speculator, prompt: str) -> list[int]:
    """A prompt as a turn of a conversation, where the tokenizer knows how to write one."""
    tokenizer = speculator.tokenizer
    chats = isinstance(tokenizer, PreTrainedTokenizerBase) and tokenizer.chat_template is not None
    return encode(tokenizer, [{"role": "user", "content": prompt}] if chats else prompt)


def _check(
    speculator: Speculator, prompts: Sequence[TextPiece], done: Sequence[TrainText], path: Path
) -> None:
    """Answers that are there already must be to the first of these prompts."""
    right = len(done) <= len(prompts) and all(
        list(text.tokens[: text.start]) == _prompt(speculator, piece.prompt)
        for text, piece in zip(done, prompts, strict=False)
    )
    if not right:
        raise ConfigurationError(
            f"{str(path)!r} was begun on other prompts; got {len(prompts)} new ones; give another "
            "--out, or delete that file's folder"
        )


def _read(path: Path) -> list[tuple[TrainText, bool | None]]:
    if not path.exists():
        return []
    whole = path.read_text("utf-8")
    whole = whole[: whole.rfind("\n") + 1]  # a line that was cut off is written again
    path.write_text(whole, "utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    return [(TrainText(tuple(row["tokens"]), row["start"]), row["held_out"]) for row in rows]


LIKELY = 4  #: of the target's likeliest tokens, how many of each place are counted
Show = Callable[[str, int, int], None]  #: what is done now, how much is done, of how much


class Result(NamedTuple):
    """What a training came to."""

    student: Student
    before: Alpha
    after: Alpha
    progress: Progress
    learnt: dict[str, int]  #: tokens by source


def run(
    speculator: Speculator,
    model: PreTrainedModel,
    task: Task,
    show: Show,
    say: Callable[[str], None] = lambda line: None,
) -> Result | None:
    """Train a draft for the target that this speculator runs; `model` is its transformers model.

    `say` is told one line if an earlier run is resumed.
    None: interrupted while it trained, and saved. Raises ConfigurationError for texts that cannot
    be used and targets without states to read.
    """
    target = speculator.engine.target
    _suits(task, model.config)
    work = task.out / "work"
    work.mkdir(parents=True, exist_ok=True)
    _same(work / "target.json", _weights(model), "for another target")
    layers = _layers(model.config, task) if task.kind == "layers" else ()
    kind = task.kind, layers, task.vocab_size, task.inner
    _same(work / "draft.json", kind, "for another kind, layers or vocabulary")
    if task.prompts:
        how = task.tokens, task.plan.seed
        _same(work / "answers.json", how, "with answers of another length or seed")
    learnt, held, counts = _texts(speculator, task, work, show)
    aux_layers = usual_aux_layers(depth(model.config)) if task.kind == "head" else ()
    _same(work / "features.json", (learnt, aux_layers), "on other texts")
    features_at = work / "features"
    record(
        target, learnt, aux_layers, features_at, show=lambda n, of: show("target's states", n, of)
    )
    features = read(features_at)
    student = _student(model, features, aux_layers, task)
    trainer = Trainer(student, features, target.vocab_size, task.plan, work)
    measured = held[:: -(-len(held) // task.alpha_texts)]
    before_at = work / "before.json"
    if trainer.resume() and before_at.exists():
        before = Alpha.of(json.loads(before_at.read_text("utf-8")))
        say(f"going on from {task.plan.reached(trainer.progress)}: {trainer.checkpoint}")
    else:
        before = alpha(target, student, measured, lambda n, of: show("alpha before", n, of))
        before_at.write_text(json.dumps(before.as_dict()), "utf-8")

    def report(progress: Progress, sums: Sequence[Losses]) -> None:
        first = sums[0]
        entropy, agreed = (float(each) / max(first.places, 1) for each in first[:3:2])
        text = f"step {progress.step}: loss {entropy:.2f}, agreement {agreed:.2f}"
        show(text, *task.plan.progress(progress))

    if not trainer.train(report):
        return None
    after = alpha(target, student, measured, lambda n, of: show("alpha after", n, of))
    student.write(task.out, task.target)
    return Result(student, before, after, trainer.progress, counts)


def look(task: Task) -> None:
    """Refuse what files and the target's configuration say already, before weights are read.

    Raises ConfigurationError.
    """
    texts.read(task.data, ("text",))
    texts.read(task.prompts, ("prompt",))
    _suits(task, ModelSource(task.target, "target", trust=task.trust).config)


def _suits(task: Task, config: PretrainedConfig) -> None:
    """Refuse a target that reads no text alone, and layers that it has not."""
    if reads_more(config):
        raise ConfigurationError(
            f"a draft is trained on texts that the target goes on from; got {task.target}, "
            "which reads an input of another kind; give a decoder-only target"
        )
    if task.kind == "layers":
        check(layer_subset.LayerSubset(_layers(config, task)), config, task.target)


def _texts(
    speculator: Speculator, task: Task, work: Path, show: Show
) -> tuple[list[TrainText], list[TrainText], dict[str, int]]:
    """Texts to learn, held-out ones, and how many tokens of which source are learnt."""
    pieces = texts.read(task.data, ("text",))
    prompts = texts.read(task.prompts, ("prompt",))
    given = texts.tokenized(pieces, speculator.tokenizer)
    own = answered(
        speculator,
        prompts,
        work / "answers.jsonl",
        tokens=task.tokens,
        rows=task.rows,
        seed=task.plan.seed,
        show=lambda n, of: show("answers of the target", n, of),
    )
    learnt, held = texts.split([*own, *given])
    mine = {text for text, _ in own}
    counts = {"texts": 0, "answers of the target": 0}
    for text in learnt:
        counts["answers of the target" if text in mine else "texts"] += len(text.tokens)
    return learnt, held, {name: count for name, count in counts.items() if count}


def _student(
    model: PreTrainedModel, features: Sequence[Features], aux_layers: tuple[int, ...], task: Task
) -> Student:
    torch.manual_seed(task.plan.seed)
    ids_K = frequent(features, vocabulary_of(model.config), task.vocab_size)
    with torch.device("cpu"):  # modules, which move themselves
        if task.kind == "head":
            return HeadStudent(model, ids_K, aux_layers, task.inner)
        return LayerStudent(model, ids_K, _layers(model.config, task))


def _layers(config: PretrainedConfig, task: Task) -> tuple[int, ...]:
    return task.layers or tuple(sorted({0, depth(config) - 1}))


def _weights(model: PreTrainedModel) -> list[tuple[str, list[float]]]:
    """Some numbers of every weight: what tells a target from its like."""
    return [
        (name, weight.detach().flatten()[:: max(weight.numel() // 8, 1)].float().tolist())
        for name, weight in model.named_parameters()
    ]


def _same(path: Path, of: object, otherwise: str) -> None:
    """Refuse to go on with what was made of something else."""
    fingerprint = hashlib.sha256(repr(of).encode()).hexdigest()
    if path.exists() and json.loads(path.read_text("utf-8")) != fingerprint:
        raise ConfigurationError(
            f"the training in {str(path.parent)!r} was begun {otherwise}; give another --out, or "
            "delete that folder"
        )
    path.write_text(json.dumps(fingerprint), "utf-8")


def frequent(texts: Sequence[Features], vocab_size: int, most: int) -> Tensor:
    """The `most` tokens [K] that the target finds likely most often (FR-Spec's idea), growing.

    Fewer if the texts know fewer.
    """
    counts = torch.zeros(vocab_size, dtype=torch.float32, device="cpu")
    for text in texts:
        likely = text.top_ids_NM[text.start - 1 :, :LIKELY].flatten().long()
        counts += torch.bincount(likely, minlength=vocab_size)
    known = int((counts > 0).sum())
    return counts.topk(min(most, known)).indices.sort().values
