"""Whisper's own `generate` against itself with `custom_generate`: windows, thresholds, words."""

import copy

import pytest
import torch
import transformers
from spoken_whisper import FIRST_TIME, PREVIOUS, features, perturbed, whisper
from transformers import WhisperForCausalLM
from transformers.generation.logits_process import WhisperNoSpeechDetection

from outrider.errors import ConfigurationError
from outrider.integrations import encoder_inputs, generate_call as calls
from outrider.integrations.generate import SpeculativeGenerate, speculative

SHORT, LONG = (1.0, 0.6), (2.3, 1.4)
CONDITIONED = {"condition_on_prev_tokens": True, "return_timestamps": True}
THRESHOLDS = {
    "return_timestamps": True,
    "temperature": (0.0,),
    "logprob_threshold": -1.0,
    "compression_ratio_threshold": 1.35,
    "no_speech_threshold": 0.6,
    "return_segments": True,
}
WORDS = {"return_timestamps": True, "return_token_timestamps": True, "return_segments": True}
PROMPT = {"prompt_ids": torch.tensor([PREVIOUS, 65, 66, 67]), "return_timestamps": True}
WAYS = {
    "short": (SHORT, {}),
    "detected": (SHORT, {"language": None}),
    "dictionary": (SHORT, {"return_dict_in_generate": True, "output_scores": True}),
    "timestamps": (SHORT, {"return_timestamps": True}),
    "words": (SHORT, WORDS),
    "words without times": (SHORT, {"return_token_timestamps": True}),
    "long": (LONG, {"return_timestamps": True}),
    "conditioned": (LONG, CONDITIONED),
    "prompted": (LONG, PROMPT),
    "thresholds": (LONG, THRESHOLDS),
    "long words": (LONG, WORDS),
    "sequences": (
        SHORT,
        {"num_return_sequences": 2, "do_sample": True, "temperature": 1.0, "top_k": 1},
    ),
}


@pytest.fixture(autouse=True)
def quiet():
    """transformers has advice for some of these calls."""
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


def both(model, way, **drafting):
    """Plain and speculative results of one call, and what accepted."""
    seconds, how = WAYS[way] if isinstance(way, str) else way
    frames, mask = features(seconds)
    how = {"language": "en", "attention_mask": mask} | how
    call, results = SpeculativeGenerate(**drafting), []
    for custom in (None, call):
        torch.manual_seed(0)
        results.append(model.generate(frames, custom_generate=custom, **how))
    return (*results, call)


def same(fast, plain):
    """Everything in two results of the same call, segment by segment."""
    assert type(fast) is type(plain)
    if isinstance(plain, torch.Tensor):
        assert fast.shape == plain.shape
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)
    elif isinstance(plain, dict):
        assert fast.keys() >= plain.keys() - {"past_key_values"}
        for name in plain.keys() & fast.keys():
            same(fast[name], plain[name])
    elif isinstance(plain, (list, tuple)):
        assert len(fast) == len(plain)
        for mine, theirs in zip(fast, plain, strict=True):
            same(mine, theirs)
    else:
        assert fast == plain


@pytest.mark.one_in(12)
@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")  # of lengths that differ
@pytest.mark.parametrize("way", WAYS)
def test_equal_to_plain_generate(way):
    model = whisper(attention="eager" if "words" in way else "sdpa")
    plain, fast, call = both(model, way, draft_model=perturbed(model), num_speculative_tokens=3)
    same(fast, plain)
    assert call.total.accepted > 10


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafting", [{"branching": (2, 2)}, {"drafter": "dynamic_tree"}])
def test_trees(drafting):
    model = whisper()
    plain, fast, call = both(model, "conditioned", draft_model=perturbed(model), **drafting)
    same(fast, plain)
    assert call.total.accepted > 10


@pytest.mark.exhaustive
def test_every_window_copies_from_the_reference_of_its_recording():
    model = whisper()
    frames, mask = features((2.3, 1.4, 3.1))
    how = {"language": "en", "attention_mask": mask, "return_timestamps": True}
    plain = model.generate(frames, **how)
    texts = plain.tolist()
    steps = {}
    for name, reference in (("own", texts), ("another's", [texts[1], texts[2], texts[0]])):
        call = SpeculativeGenerate(drafter="reference_lookup", ngram=(3, 8))
        fast = model.generate(frames, custom_generate=call, reference=reference, **how)
        same(fast, plain)
        steps[name] = call.total.steps
    assert steps["own"] < 0.8 * steps["another's"]
    with pytest.raises(ConfigurationError, match="2 for 3 rows"):
        model.generate(frames, custom_generate=call, reference=texts[:2], **how)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seconds", [(1.0,), SHORT])
def test_fallback_temperatures_draw_from_the_same_states(seconds):
    """The hotter of two temperatures is as good as greedy: the same tokens come again."""
    how = {
        "return_timestamps": True,
        "temperature": (0.0, 1e-3),
        "logprob_threshold": 0.0,
        "return_segments": True,
    }
    model = whisper()
    plain, fast, _ = both(model, (seconds, how), draft_model=perturbed(model))
    same(fast["sequences"], plain["sequences"])


def _rolled(encoded):
    """Every row with its neighbour's states."""
    rows = range(len(encoded.mask_BT))
    return encoded.take([*rows[1:], 0])


def test_the_wrong_states_are_noticed(monkeypatch):
    right = encoder_inputs._encoded
    monkeypatch.setattr(encoder_inputs, "_encoded", lambda *given: _rolled(right(*given)))
    plain, wrong, _ = both(whisper(), "long", drafter="none")
    assert plain.shape != wrong.shape or not torch.equal(plain, wrong)


def heard(model, custom):
    """What the test for silence notes, and how often the encoder ran meanwhile."""
    noted, calls = [], []
    right = WhisperNoSpeechDetection.__call__

    def spy(self, input_ids, scores):
        scores = right(self, input_ids, scores)
        if input_ids.shape[1] == self.begin_index:
            noted.append(self.no_speech_prob.clone())
        return scores

    hook = model.model.encoder.register_forward_hook(lambda *_: calls.append(1))
    frames, mask = features(LONG)
    how = {"language": "en", "attention_mask": mask, **THRESHOLDS}
    try:
        WhisperNoSpeechDetection.__call__ = spy
        model.generate(frames, custom_generate=custom, **how)
    finally:
        WhisperNoSpeechDetection.__call__ = right
        hook.remove()
    return noted, len(calls)


def test_silence_is_judged_on_states_that_are_there():
    model = whisper()
    speculative_call = SpeculativeGenerate(drafter="none")
    heard(model, speculative_call)  # checked when it is first seen
    plain, calls = heard(model, None)
    fast, mine = heard(model, speculative_call)
    assert len(plain) == len(fast) > 2
    for one, other in zip(fast, plain, strict=True):
        torch.testing.assert_close(one, other)
    assert (calls, mine) == (2 * len(plain), len(plain))


def test_silence_without_a_language_is_read_from_the_first_scores():
    """An English-only model with timestamps starts with one token: its own scores are judged."""
    model = whisper(seed=1)
    model.generation_config.is_multilingual = False
    frames, mask = features(LONG)
    how = {"attention_mask": mask, **THRESHOLDS}
    try:
        plain = model.generate(frames, **how)
        fast = model.generate(frames, custom_generate=SpeculativeGenerate(drafter="none"), **how)
    finally:
        model.generation_config.is_multilingual = True
    same(fast["sequences"], plain["sequences"])


@pytest.mark.exhaustive
def test_a_decoder_alone_drafts_on_the_models_states():
    model = whisper()
    draft = WhisperForCausalLM(copy.deepcopy(model.config)).eval()
    near = perturbed(model)
    draft.model.decoder.load_state_dict(near.model.decoder.state_dict())
    draft.proj_out.load_state_dict(near.proj_out.state_dict())
    plain, fast, call = both(model, "conditioned", draft_model=draft)
    same(fast, plain)
    assert call.stats.accepted > 5


def test_a_draft_that_hears_other_frames():
    """Its own frames of whole recordings are cut into the windows that the target hears."""
    model, other = whisper(), whisper(seed=4, num_mel_bins=40)
    frames, mask = features(LONG)
    how = {"language": "en", "attention_mask": mask, "return_timestamps": True}
    plain = model.generate(frames, **how)
    with pytest.raises(ConfigurationError, match=r"40 mels, the target .* 80 mels.*draft_inputs="):
        model.generate(frames, custom_generate=speculative, draft_model=other, **how)
    how["draft_inputs"] = frames
    with pytest.raises(ConfigurationError, match=r"draft_inputs must be frames \[B, 40, F\]"):
        model.generate(frames, custom_generate=speculative, draft_model=other, **how)
    drafted = {}
    for name, given in (("same", {"input_features": frames}), ("rolled", frames.roll(1, 0))):
        call, how["draft_inputs"] = SpeculativeGenerate(draft_model=perturbed(model)), given
        fast = model.generate(frames, custom_generate=call, **how)
        same(fast, plain)
        drafted[name] = call.total.draft_acceptance_rate
    assert drafted["same"] > drafted["rolled"] + 0.1


def test_rules_are_settings_and_nothing_is_replayed(monkeypatch):
    seen = []
    right = calls.settings
    monkeypatch.setattr(calls, "settings", lambda *a: seen.append(right(*a)) or seen[-1])
    both(whisper(), "conditioned", drafter="none")
    both(whisper(), "thresholds", drafter="none")
    assert seen
    for fields in seen:
        assert "processors" not in fields
        assert fields["timestamps"].first_id == FIRST_TIME
        assert fields["logit_bias"][7] == -torch.inf
        assert fields["begin_suppress_tokens"]


def test_attention_weights_of_words_are_cut_as_plain_decodings():
    """One pass over the text afterwards gives one entry for each call of plain decoding."""
    model = whisper(attention="eager")
    frames, _ = features(SHORT)
    how = {"language": "en", "return_dict_in_generate": True, "output_attentions": True}
    how["force_unique_generate_call"] = True
    plain = model.generate(frames, **how)
    fast = model.generate(frames, custom_generate=SpeculativeGenerate(drafter="none"), **how)
    for name in ("cross_attentions", "decoder_attentions"):
        same(getattr(fast, name), getattr(plain, name))
