"""A search with patience is openai-whisper's, written here once more as its paper words it."""

import pytest
import torch

from outrider import Beams, PromptLookup, Request, Root, SamplingParams, StopConditions
from outrider.engine.beam_search.search import search
from tiny import llama, pair

PROMPTS = ([3, 9, 4, 3, 9], [5, 6], [11, 12, 13, 14, 11, 12])
STOP, BUDGET = 7, 16


def expected(network, prompt, width, patience):
    """Sequences with their sums, by dictionaries."""
    beams, finished, most = {tuple(prompt): 0.0}, {}, round(width * patience)
    for _ in range(BUDGET):
        scores = {}
        for text, total in beams.items():
            law = torch.log_softmax(network(torch.tensor([text])).logits[0, -1], -1)
            for value, token in zip(*(t.tolist() for t in law.topk(width + 1)), strict=True):
                scores[(*text, token)] = total + value
        beams, ended = {}, {}
        for text in sorted(scores, key=scores.get, reverse=True):
            if text[-1] == STOP:
                ended[text] = scores[text]
            else:
                beams[text] = scores[text]
                if len(beams) == width:
                    break
        for text in ended:
            if len(finished) >= most:
                break
            finished[text] = ended[text]
        if len(finished) >= most:
            break
    for text in beams:
        if len(finished) >= width:
            break
        finished[text] = beams[text]
    start = len(prompt)
    counted = {t: s / max(len(t) - start - (t[-1] == STOP), 1) for t, s in finished.items()}
    best = sorted(counted, key=counted.get, reverse=True)
    return [list(text[start:]) for text in best], [counted[text] for text in best]


@pytest.mark.parametrize("patience", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 5])
@torch.inference_mode()
def test_identical_beams(width, patience):
    target, _ = pair()
    beams = Beams(width, patience=patience, num_return_sequences=width)
    requests = [Request(p, SamplingParams(0), StopConditions(BUDGET, (STOP,))) for p in PROMPTS]
    for drafter in (Root(), PromptLookup(3)):
        found = search(target, drafter, requests, beams)
        for prompt, row in zip(PROMPTS, found.hypotheses, strict=True):
            texts, scores = expected(llama(), prompt, width, patience)
            assert [one.token_ids for one in row] == texts[:width]
            mine = torch.tensor([one.score for one in row])
            torch.testing.assert_close(mine, torch.tensor(scores[:width]), rtol=1e-4, atol=1e-4)
