"""Prompts and texts that a head of SmolLM2 is trained on, made from what lies on the machine.

    python -m training.smollm2_prompts --out work/smollm2 [--count 1500]

writes `prompts.jsonl` (questions, stories, small jobs on passages of documentation and on code),
whose answers the model itself writes, and `texts.jsonl` (passages of Python's own documentation).
Every twentieth prompt is held out; those are on subjects of their own. Wording is this project's;
passages are Python's (PSF licence). Subjects on which heads have been judged are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

SUBJECTS = """
gravity|black holes|the water cycle|volcanoes|earthquakes|rainbows|lightning|the tides|the seasons
|photosynthesis|cell division|DNA|evolution|vaccines|antibiotics|the immune system|the human heart
|the lungs|sleep|memory|digestion|muscles|the brain|vision|hearing|allergies|vitamins|protein
|caffeine|exercise|meditation|stress|bees|ants|whales|sharks|owls|wolves|elephants|coral reefs
|rainforests|deserts|glaciers|rivers|mountains|caves|islands|clouds|hurricanes|climate change
|recycling|solar panels|wind turbines|nuclear power|batteries|electric cars|bicycles|steam engines
|airplanes|rockets|satellites|telescopes|microscopes|lasers|magnets|radio waves|semiconductors
|the internet|search engines|databases|compilers|operating systems|encryption|passwords
|machine learning|neural networks|robots|recursion|sorting algorithms|binary numbers|prime numbers
|fractions|percentages|probability|statistics|calculus|geometry|the Pythagorean theorem|pi|algebra
|inflation|interest rates|the stock market|taxes|insurance|supply and demand|free trade|budgets
|saving money|job interviews|writing a resume|public speaking|teamwork|leadership|negotiation
|time management|procrastination|habits|goal setting|learning a language|reading|essay writing
|poetry|grammar|the Roman Empire|ancient Egypt|ancient Greece|the Silk Road|the Middle Ages
|the Renaissance|the printing press|the Industrial Revolution|the French Revolution|the Cold War
|the moon landing|democracy|constitutions|human rights|elections|the United Nations|philosophy
|ethics|logic|religion|mythology|painting|sculpture|photography|cinema|theatre|jazz|opera|the piano
|the violin|the guitar|dance|chess|football|basketball|tennis|swimming|running a marathon|yoga
|hiking|camping|gardening|composting|houseplants|trees|mushrooms|apples|tomatoes|bread|cheese|rice
|pasta|soup|chocolate|coffee|tea|honey|salt|spices|olive oil|cooking eggs|baking a cake|fasting
|dogs|cats|parrots|horses|goldfish|dinosaurs|fossils|minerals|diamonds|gold|iron|glass|paper|plastic
|cotton|silk|soap|candles|bridges|skyscrapers|lighthouses|castles|museums|libraries|schools
|hospitals|airports|trains|ships|submarines|maps|compasses|clocks|calendars|time zones|money
|Mars|Jupiter|Saturn|the sun|the moon|comets|galaxies|the Big Bang|light|sound|heat|friction
|pressure|atoms|molecules|acids|oxygen|carbon|water|ice|fire|energy|electricity|plate tectonics
""".replace("\n", "").split("|")

ASKED = """
What is {}?|What are the most important facts about {}?|Explain {} to a ten-year-old.
|Explain {} in simple terms.|How would you describe {} to someone who has never heard of it?
|Why does {} matter?|Give me five interesting facts about {}.|Write a short paragraph about {}.
|What are common misunderstandings about {}?|What should a beginner know about {}?
|Write an introduction to an article about {}.|List the advantages and disadvantages of {}.
|How has {} changed over the last hundred years?|What is the history of {}?
|Write a short poem about {}.|What questions do people often ask about {}, and what are the answers?
|Tell me about {}.|How does {} affect everyday life?|Give me a lesson plan about {}.
|Can you summarize what is known about {}?|Write a letter to a friend about {}.
|What is the difference between what people believe about {} and what is true?
|Describe {} in three sentences.|I want to learn about {}. Where do I start?
|Write a dialogue between a teacher and a student about {}.
""".replace("\n", "").split("|")

HEROES = """
a fox|a lonely dragon|a young wizard|an old sailor|a clockmaker|a little girl|a brave knight
|a tired robot|a baker|a lost puppy|two brothers|a princess|a gardener|an astronaut|a detective
|a blind musician|a shy ghost|a pirate|a farmer|a librarian|a painter|a wolf|a mouse|a queen
|a time traveller|a lighthouse keeper|a doctor|a thief|a schoolteacher|a talking cat|a boy
|a scientist|an owl|a giant|a mermaid|a soldier|a nurse|a shepherd|a bear|a chef|a poet
|a grandmother|an inventor|a spy|a snowman|a tailor|a miner|a postman|a violinist|an elephant
""".replace("\n", "").split("|")

PLOTS = """
who finds a hidden door|who learns to trust others|who gets lost in a forest|who keeps a secret
|who wants to see the ocean|who meets a stranger at night|who loses something precious
|who must make a hard choice|who discovers a map|who builds a machine|who makes a promise
|who travels to a distant city|who is afraid of the dark|who saves a village|who finds a letter
|who tries to catch the moon|who hears a strange song|who wakes up in another century
|who wins an unlikely race|who forgives an old enemy|who plants a magic seed
|who opens a small shop|who spends a winter alone|who learns to fly|who tells the truth at last
""".replace("\n", "").split("|")

TOLD = """
Write a short story about {} {}.|Tell me a story about {} {}.|Write the beginning of a tale about {}
 {}.|Write a bedtime story about {} {}.|Write a fable about {} {}, with a moral.|Continue this
 story: Once upon a time there was {} {}.|Write a funny story about {} {}.|Write a mystery about {}
 {}.|Write a diary entry of {} {}.|Describe a scene from a film about {} {}.
""".replace("\n", "").split("|")

JOBS = """
Summarize the following text in a few sentences.|Explain the following text in simple words.|What
 is the main idea of this text?|Write three questions about this text and answer them.|Rewrite this
 text so that it is easier to read.|What can I learn from the following passage?
""".replace("\n", "").split("|")

TASKS = """
reverses a string|counts the words of a text|checks whether a number is prime|sorts a list of names
|computes the average of a list|finds the largest number of a list|removes duplicates from a list
|reads a file and prints its lines|merges two sorted lists|checks whether a word is a palindrome
|computes Fibonacci numbers|converts Celsius to Fahrenheit|counts vowels in a sentence|adds two
 matrices|finds the most common letter|parses a date|downloads nothing but prints a greeting|stores
 contacts in a dictionary|implements a stack|implements a queue|searches a sorted list|draws a
 triangle of stars|validates an email address|computes a factorial|rolls two dice
""".replace("\n", "").split("|")

CODED = """
Write a Python function that {}.|Write a Python program that {}, and explain it step by step.|How
 do I write code that {}?|Write a short class in Python that {}.
""".replace("\n", "").split("|")

#: What free-text prompts were about on which heads were judged.
JUDGED = ("vaccines", "bicycles", "prime number", "learning a language", "lighthouse", "baker")
HELD = 20  #: every so manieth prompt is held out


def passages(least: int = 300, most: int = 1200) -> Iterator[str]:
    """Runs of paragraphs of Python's documentation, none of them twice."""
    for _, text in sorted(topics.items()):
        run = ""
        for part in re.split(r"\n\s*\n", text):
            part = " ".join(part.split())
            if len(run) + len(part) > most and len(run) >= least:
                yield run
                run = ""
            run = f"{run}\n\n{part}".strip()[: 2 * most]
        if len(run) >= least:
            yield run


def cases(rng: random.Random, held: bool) -> list[dict[str, object]]:
    """Prompts with their kind, shuffled; those held out share no subject with the others."""

    def half(items: list[str]) -> list[str]:
        return [item.strip() for n, item in enumerate(items) if (n % 10 == 7) == held]

    asked = [(each, form) for each in half(SUBJECTS) for form in ASKED]
    told = [(who, what, form) for who in half(HEROES) for what in PLOTS for form in TOLD]
    texts = [(text, job) for text in half(list(passages())) for job in JOBS]
    coded = [(task, form) for task in half(TASKS) for form in CODED]
    for group in (asked, told, texts, coded):
        rng.shuffle(group)
    share = 0.06 if held else 1.0
    rows = [("question", form.strip().format(each)) for each, form in asked[: int(2200 * share)]]
    rows += [("story", form.strip().format(*each)) for *each, form in told[: int(1600 * share)]]
    rows += [("passage", f"{job.strip()}\n\n{text}") for text, job in texts[: int(400 * share)]]
    rows += [("code", form.strip().format(task)) for task, form in coded[: int(200 * share)]]
    rng.shuffle(rows)
    return [
        {"kind": kind, "prompt": prompt, "held_out": held}
        for kind, prompt in rows
        if not any(word in prompt for word in JUDGED)
    ]


def mixed(seed: int, count: int) -> list[dict[str, object]]:
    """So many prompts, every twentieth of them held out."""
    learnt, held = (iter(cases(random.Random(seed), side)) for side in (False, True))
    rows = (next(held if n % HELD == HELD // 2 else learnt, None) for n in range(count))
    return [row for row in rows if row is not None]


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1500, help="prompts, at most some 4,400")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[dict[str, object]]] = {
        "prompts": mixed(asked.seed, asked.count),
        "texts": [{"text": text} for n, text in enumerate(passages()) if n % 10 != 7],
    }
    for name, rows in files.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (asked.out / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        print(f"{name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
