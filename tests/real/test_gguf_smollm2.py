"""SmolLM2's GGUF file: it chats, and its greedy texts are those of the directory made of it."""

import pytest

import outrider
from outrider import SamplingParams, Stop

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = (
    "Name the largest planet of the solar system.",
    "Write a Python function that adds two numbers.",
    "What is the capital of France?",
    "Tell me a story of a fox, in three sentences.",
)


def answers(speculator):
    """Greedy answers through the chat template: token ids and why they end."""
    found = []
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        prompt = speculator.tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True
        )
        done = speculator.generate(prompt, SamplingParams(0), Stop(48)).completions[0]
        found.append((prompt, done.token_ids, done.finish_reason))
    return found


@pytest.mark.real
@pytest.mark.slow
def test_greedy_texts_are_those_of_the_converted_directory(models_directory):
    """Q4_1 unpacked to bfloat16, which is what the directory holds; drafted and plain."""
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="pip install 'outrider[gguf]'")
    files = sorted(models_directory.rglob(FILE))
    if not files:
        pytest.skip(f"needs {FILE} below the directory of models")
    how = {"dtype": "bfloat16", "threads": 1, "pack_weights": False, "planner": "fixed"}
    from_file = outrider.load(files[0], **how)
    from_folder = outrider.load(models_directory / "smollm2", **how)
    told = answers(from_file)
    assert told == answers(from_folder)
    assert told == answers(from_file.plain())
    assert "stop" in [reason for _, _, reason in told]
