"""The shipped draft for Python code beside SmolLM2, whose tokenizer is another: few common tokens.

The folder `smollm2` of OUTRIDER_MODELS; some 40 seconds on one core.
"""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import DraftModel, SamplingParams, Stop
from outrider.drafters import StringMatch
from outrider.integrations.generate import SpeculativeGenerate
from outrider.shipped import shipped

pytestmark = pytest.mark.real

GREEDY, END = SamplingParams(temperature=0), Stop(32)
PROMPTS = ["def mean(values):\n", "class Stack:\n    def __init__(self):\n", "# été ☃\nimport os\n"]


@pytest.fixture(scope="module")
def pair(smollm2):
    how = {"dtype": "float32", "threads": 1, "pack_weights": False, "num_speculative_tokens": 4}
    return outrider.load(smollm2, shipped("draft"), **how)


def test_greedy_text_is_plain_decodings_and_code_is_drafted_well(pair):
    assert pair.engine.drafter.name == "translated"
    assert "3,134 of the 49,135 tokens" in pair.notes.vocabulary
    done = pair.generate(PROMPTS, GREEDY, END)
    assert done.texts == pair.plain().generate(PROMPTS, GREEDY, END).texts
    assert done.stats.new_tokens / done.stats.steps > 1.5


@pytest.mark.parametrize("shape", ["tree", "strings"])
def test_text_of_a_seed_is_plain_decodings(pair, shape):
    """Under `match`: a tree over common tokens, and strings, which chat's special tokens end."""
    model = pair.engine.drafter.model
    drafter = DraftModel(model, (2, 1, 1)) if shape == "tree" else StringMatch(model)
    chat = [[{"role": "user", "content": "Write a line of Python."}]]
    how = SamplingParams(0.8, seed=3)
    for prompts in (PROMPTS, chat):
        fast = pair.using(drafter, "match").generate(prompts, how, END)
        assert fast.texts == pair.using(drafter, "match").plain().generate(prompts, how, END).texts


def test_generate_takes_both_tokenizers(smollm2):
    """As transformers calls them; sequences are those of its own greedy decoding."""
    target = AutoModelForCausalLM.from_pretrained(smollm2, dtype="float32")
    draft = AutoModelForCausalLM.from_pretrained(shipped("draft"), dtype="float32")
    ours, theirs = (AutoTokenizer.from_pretrained(where) for where in (smollm2, shipped("draft")))
    inputs = ours(PROMPTS[:1], return_tensors="pt")
    how = {"do_sample": False, "max_new_tokens": 24}
    drafts = SpeculativeGenerate(draft_model=draft, num_speculative_tokens=4)
    made = target.generate(
        **inputs, custom_generate=drafts, tokenizer=ours, assistant_tokenizer=theirs, **how
    )
    assert made.tolist() == target.generate(**inputs, **how).tolist()
    assert drafts.stats.accepted > 0
