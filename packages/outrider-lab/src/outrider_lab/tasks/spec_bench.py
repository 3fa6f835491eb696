"""Files as Spec-Bench (Xia et al. 2024) reads them: `question.jsonl`, and answers of each arm.

    FOLDER/question.jsonl                       question_id, category, turns, reference
    FOLDER/model_answer/ARM-temp0.jsonl         question_id, category, answer_id, model_id, choices

A choice has `turns` (texts), `decoding_steps`, `new_tokens` and `wall_time`, one for each turn, and
`accept_lengths`, the tokens of each step. Spec-Bench's `evaluation/speed.py` compares an arm's file
with that of plain decoding.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from outrider_lab.certify.report import Row
from outrider_lab.tasks.prompts import PromptTask
from outrider_lab.tasks.run import TaskAnswers


def write(folder: Path, answers: TaskAnswers, model: str) -> list[Path]:
    """All files; those of an earlier run are replaced."""
    (folder / "model_answer").mkdir(parents=True, exist_ok=True)
    paths = [folder / "question.jsonl"]
    _lines(paths[0], map(_question, answers.tasks))
    for (t, arm), rows in answers.rows.items():
        path = folder / "model_answer" / f"{arm}-temp{t:g}.jsonl"
        name = f"{model}-{arm}-temp{t:g}"
        pairs = zip(answers.tasks, rows, strict=True)
        _lines(path, (_answer(task, row, name) for task, row in pairs))
        paths.append(path)
    return paths


def _lines(path: Path, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def _question(task: PromptTask) -> Row:
    row: Row = {name: vars(task)[name] for name in ("question_id", "category", "turns")}
    return row | ({"reference": [task.reference]} if task.reference else {})


def _answer(task: PromptTask, row: Row, name: str) -> Row:
    choice = {
        "index": 0,
        "turns": [row["text"].strip()],
        "decoding_steps": [row["steps"]],
        "new_tokens": [len(row["ids"])],
        "wall_time": [row["wall_time"]],
        "accept_lengths": row["accept_lengths"],
    }
    return {
        "question_id": task.question_id,
        "category": task.category,
        "answer_id": hashlib.sha256(f"{name} {task.question_id}".encode()).hexdigest()[:22],
        "model_id": name,
        "choices": [choice],
        "tstamp": row["finished"],
    }
