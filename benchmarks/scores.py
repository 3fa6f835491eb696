"""lm-evaluation-harness through a running server, and by its own `hf` backend: the same scores.

    outrider serve --model MODEL --dtype float32 --port 8123 &
    python benchmarks/scores.py http://127.0.0.1:8123 MODEL

Two small tasks that are written here: choices (accuracy), and texts (perplexity a word). Needs
pip install 'lm-eval[api,hf]'. The exit code is 1 if a metric or a log-probability differs.
"""

import argparse
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

from loopback import past_proxies

CHOICES = [
    ("The capital of France is", " Paris", " Rome"),
    ("The capital of Italy is", " Rome", " Berlin"),
    ("The capital of Germany is", " Berlin", " Madrid"),
    ("The capital of Spain is", " Madrid", " Lima"),
    ("Water freezes at a temperature of", " 0 degrees", " 90 degrees"),
    ("The opposite of hot is", " cold", " warm"),
    ("Two and two make", " four", " seven"),
    ("A week has", " seven days", " nine days"),
    ("The sun rises in the", " east", " west"),
    ("Bees make", " honey", " milk"),
    ("The largest planet is", " Jupiter", " Mars"),
    ("Shakespeare wrote", " Hamlet", " Faust"),
    ("def add(a, b):\n    return a", " + b", " - c"),
    ("for i in range(10):\n    print(", "i)", "]"),
    ("import numpy as", " np", " pd"),
    ("The first month of the year is", " January", " June"),
]
TEXTS = [
    "The river rises in the mountains and flows through three countries before it meets the sea.",
    "She opened the window, because the room was warm, and listened to the rain for a while.",
    "To bake bread you need flour, water, salt and yeast; the dough has to rest for some hours.",
    "A prime number is a natural number greater than one that has no divisors but one and itself.",
    "The old man had not spoken for years. On that evening, to everybody's surprise, he sang.",
    "Light travels three hundred thousand kilometres in one second, sound only a third of one.",
]
CHOICE = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choices.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
TEXT = """
task: texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}}
  - {{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}}
"""


def scored(backend, arguments, folder):
    """Metrics of both tasks, and the log-probabilities that they are made of, in order."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    done = simple_evaluate(
        backend,
        model_args=arguments,
        tasks=["choices", "texts"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
        batch_size=1,
        device="cpu",
        log_samples=True,
    )
    metrics = {
        f"{task} {name.partition(',')[0]}": value
        for task, told in done["results"].items()
        for name, value in told.items()
        if isinstance(value, float)
    }
    logs = []
    for task in ("choices", "texts"):
        for sample in sorted(done["samples"][task], key=lambda one: one["doc_id"]):
            for said in sample["resps"]:
                value = said[0]
                logs.append(float(value[0] if isinstance(value, (list, tuple)) else value))
    return metrics, logs


def main():
    past_proxies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="for example http://127.0.0.1:8123")
    parser.add_argument("model", help="the same model, by its folder")
    parser.add_argument("--within", type=float, default=1e-3, help="nats a log-probability")
    asked = parser.parse_args()
    os.environ |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}
    with urllib.request.urlopen(asked.server + "/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    with tempfile.TemporaryDirectory() as folder:
        rows = [json.dumps({"q": q, "right": r, "wrong": w}) for q, r, w in CHOICES]
        Path(folder, "choices.jsonl").write_text("\n".join(rows))
        Path(folder, "texts.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in TEXTS))
        Path(folder, "choices.yaml").write_text(CHOICE.format(folder=folder))
        Path(folder, "texts.yaml").write_text(TEXT.format(folder=folder))
        served = f"model={name},base_url={asked.server}/v1/completions,num_concurrent=1,"
        served += f"tokenizer_backend=huggingface,tokenizer={asked.model},tokenized_requests=True"
        mine, my_logs = scored("local-completions", served, folder)
        own = f"pretrained={asked.model},dtype=float32"
        theirs, their_logs = scored("hf", own, folder)
    widest = max(abs(a - b) for a, b in zip(my_logs, their_logs, strict=True))
    told = {"outrider": mine, "hf": theirs, "log-probabilities": len(my_logs), "widest": widest}
    print(json.dumps(told, indent=1))
    same = all(abs(mine[k] - theirs[k]) <= 1e-3 * max(1, abs(theirs[k])) for k in theirs)
    return int(not (same and mine.keys() == theirs.keys() and widest <= asked.within))


if __name__ == "__main__":
    sys.exit(main())
