"""A pretrained encoder-decoder: molecules to similar ones, copied from the source where they agree.

The folder `annalog` of OUTRIDER_MODELS, with the wheel annalog-1.0.6 in it.
"""

import annalog
import pytest
import torch

import outrider
from outrider import Engine, PromptLookup, ReferenceLookup, SamplingParams, Stop
from outrider.testing import p_value
from outrider.types import Inputs

pytestmark = pytest.mark.real

MOLECULES = [
    "CC(=O)Oc1ccccc1C(=O)O",
    "Cn1c(=O)c2c(ncn2C)n(C)c1=O",
    "CC(C)Cc1ccc(cc1)C(C)C(=O)O",
    "Cc1ccc(NC(=O)c2ccc(CN3CCN(C)CC3)cc2)cc1Nc1nccc(-c2cccnc2)n1",
    "COc1cc2ncnc(Nc3ccc(F)c(Cl)c3)c2cc1OCCCN1CCOCC1",
    "CN1C(=O)CN=C(c2ccccc2)c2cc(Cl)ccc21",
    "CCCc1nn(C)c2c1nc([nH]c2=O)-c1cc(ccc1OCC)S(=O)(=O)N1CCN(C)CC1",
    "Cc1ccc(-c2cc(C(F)(F)F)nn2-c2ccc(S(N)(=O)=O)cc2)cc1",
    "CC(C)NCC(O)COc1ccc(CC(N)=O)cc1",
    "CC(=O)CC(c1ccccc1)c1c(O)c2ccccc2oc1=O",
    "O=C(CCCN1CCC(O)(c2ccc(Cl)cc2)CC1)c1ccc(F)cc1",
    "CC(C)(C)NCC(O)c1ccc(O)c(CO)c1",
]
END = Stop(98)


@pytest.fixture(scope="module")
def opened(annalog_wheel):
    tokens = annalog.vocabulary(annalog_wheel)
    model, sources = (
        annalog.model(annalog_wheel),
        [annalog.source(tokens, one) for one in MOLECULES],
    )
    speculator = outrider.load(model, dtype="float32", threads=1, pack_weights=False)
    return model, speculator, sources


def texts(generation):
    return [done.token_ids for done in generation.completions]


@pytest.mark.parametrize(("temperature", "least"), [(0.0, 3.5), (0.7, 3.0), (1.0, 2.5)])
def test_copies_save_steps_and_leave_the_text(opened, temperature, least):
    _, speculator, sources = opened
    how = [SamplingParams(temperature, seed=row) for row in range(len(sources))]
    plain = texts(speculator.plain(shared_noise=True).generate(sources, how, END))
    for ahead in (8, 6):
        done = speculator.using(ReferenceLookup(ahead)).generate(sources, how, END)
        assert texts(done) == plain
        print(f"T = {temperature}, {ahead}: {done.stats.mean_acceptance_length:.2f} tokens a step")
    assert done.stats.mean_acceptance_length >= least
    own = speculator.using(PromptLookup(6)).generate(sources, how, END)
    assert texts(own) == plain
    print(f"T = {temperature}, prompt lookup: {own.stats.mean_acceptance_length:.2f}")
    assert own.stats.mean_acceptance_length < 2


def test_greedy_text_is_transformers(opened):
    model, speculator, sources = opened
    answers = texts(speculator.generate(sources, SamplingParams(0), END))
    for source, answer in zip(sources, answers, strict=True):
        own = model.generate(
            torch.tensor([source]), max_new_tokens=98, do_sample=False, num_beams=1
        )
        assert answer == own[0, 1:].tolist()


def law_of(model, source, begun, length):
    """The probability of every text of `length` tokens behind a beginning."""
    vocab = model.config.decoder_vocab_size
    texts = torch.cartesian_prod(*[torch.arange(vocab)] * length).view(-1, length)
    encoded = model.get_encoder()(torch.tensor([source]))
    law = []
    for part in texts.split(512):
        tokens = torch.cat([torch.tensor([begun]).expand(len(part), -1), part], 1)
        states = encoded.last_hidden_state.expand(len(part), -1, -1)
        logits = model(encoder_outputs=(states,), decoder_input_ids=tokens).logits
        logs = logits[:, len(begun) - 1 : -1].double().log_softmax(-1)
        law.append(logs.gather(2, part[..., None])[..., 0].sum(1).exp())
    return torch.cat(law)


@pytest.mark.parametrize("right", [True, False])
@torch.inference_mode()
def test_sampled_text_has_the_targets_law(opened, right):
    """Two tokens at temperature 1, most of them copied; the law behind another source is another.

    The beginning is one behind which several pieces are likely.
    """
    model, speculator, sources = opened
    source, begun = sources[2], sources[2][:12]
    law = law_of(model, source if right else sources[3], begun, 2)
    engine = Engine(speculator.engine.target, ReferenceLookup(2))
    ids = torch.tensor([source])
    inputs = engine.target.encode(Inputs(ids, None, torch.ones_like(ids, dtype=torch.bool)))
    chance, run = p_value(engine, law, begun, 2, 2000, inputs=inputs)
    assert (chance > 1e-4) == right
    assert run.stats.accepted > 200
    assert run.stats.steps > 2000
