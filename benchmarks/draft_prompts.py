"""Prompts to train a draft on, of what every Python has: edits of its functions, questions.

    python benchmarks/draft_prompts.py prompts.jsonl [--each 80]
    outrider train-draft MODEL --prompts prompts.jsonl --out my-head

Half ask for a change of a function of the standard library (hints, a docstring, other names, error
handling), half are questions about its modules and about everyday subjects. None of them stands in
`outrider_lab.tasks`, which the draft may be judged on. Every twentieth is held out; the same Python
and seed give the same file.
"""

import argparse
import importlib
import inspect
import json
import random
import types
from pathlib import Path

#: Modules whose functions are edited, and asked about.
MODULES = (
    "argparse bisect calendar collections colorsys configparser copy csv datetime difflib fnmatch "
    "fractions functools getopt glob gzip heapq html http.client imaplib ipaddress json.decoder "
    "linecache locale mailbox mimetypes ntpath os pathlib pickle pprint quopri random reprlib "
    "sched shlex shutil smtplib statistics string tarfile tempfile textwrap timeit tokenize trace "
    "types urllib.parse uuid warnings zipfile"
).split()
EDITS = (
    "Add type hints to this function and change nothing else.",
    "Write a docstring for this function. Return the whole function.",
    "Rename the local variables of this function so that their names say more.",
    "Raise ValueError with a helpful message where the arguments make no sense.",
    "Rewrite this function so that it has no nested conditions.",
)
SUBJECTS = (
    "a bicycle's gears,bread,the tides,a library's catalogue,compound interest,vaccines,a heat pump"
    ",elections,tea,the night sky,earthquakes,public transport,a good night's sleep,chess openings"
    ",composting,batteries,the printing press,maps,rainbows,learning a language"
).split(",")
QUESTIONS = (
    "Explain {} to a child of ten.",
    "What are the most common mistakes that people make with {}?",
    "Give me a short plan for a talk about {}.",
    "Write a friendly letter that asks a neighbour about {}.",
)


def functions() -> list[str]:
    """Sources of the modules' own functions and methods of eight to thirty lines, in order."""
    found = []
    for name in MODULES:
        module = importlib.import_module(name)
        holders = [module, *(one for _, one in inspect.getmembers(module, inspect.isclass))]
        for holder in holders:
            for _, one in inspect.getmembers(holder, inspect.isfunction):
                if isinstance(one, types.FunctionType) and one.__module__ == name:
                    try:
                        source = inspect.cleandoc("\n" + inspect.getsource(one))
                    except OSError:
                        continue
                    if 8 <= source.count("\n") <= 30 and len(source) < 1500:
                        found.append(source)
    return list(dict.fromkeys(found))


def main() -> None:
    """Write the prompts."""
    told = argparse.ArgumentParser(description=__doc__)
    told.add_argument("out", type=Path)
    told.add_argument("--each", type=int, default=80, help="prompts of each half")
    told.add_argument("--seed", type=int, default=0)
    asked = told.parse_args()
    drawn = random.Random(asked.seed)
    edits = [
        f"{drawn.choice(EDITS)}\n\n```python\n{source}\n```"
        for source in drawn.sample(functions(), asked.each)
    ]
    questions = [form.format(subject) for form in QUESTIONS for subject in SUBJECTS]
    questions += [f"What is Python's module {name} for? Show an example." for name in MODULES]
    lines = edits + drawn.sample(questions, asked.each)
    drawn.shuffle(lines)
    text = "".join(json.dumps({"prompt": line}) + "\n" for line in lines)
    asked.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
