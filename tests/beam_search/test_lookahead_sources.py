"""Copies below beams: where a reference has been copied to is kept along the search."""

import torch

from outrider.drafters import PromptLookup, ReferenceLookup
from outrider.engine.beam_search.lookahead import OfferedCandidates
from outrider.engine.beam_search.scorer import chain
from outrider.engine.beam_search.step import Beams, Rules, start

REFERENCE = [11, 12, 13, 14, 15, 16, 17, 18, 19]
RULES = Rules(Beams(2), 1, 40)


def below(text, tokens):
    for token in tokens:
        text = text.child(token)
    return text


def offered(proposer, *texts):
    """The chains offered below these beams, as tokens behind the prompt."""
    state = start(texts[0], RULES)._replace(running=texts)
    found = proposer.propose({0: state}, proposer.depth)[0]
    leaves = [text for text in found if not any(child in found for child in text.children.values())]
    return [leaf.tokens()[1:] for leaf in leaves]


def opened():
    return OfferedCandidates(ReferenceLookup(3), "cpu", torch.tensor([REFERENCE])), chain([5])


def test_a_beam_goes_on_behind_what_it_wrote_instead():
    """The third token is not the reference's: nothing matches, and copying goes on behind it."""
    proposer, root = opened()
    assert offered(proposer, root) == [[11, 12, 13]]
    other = below(root, [11, 12, 3])
    assert offered(proposer, other) == [[11, 12, 3, 14, 15, 16]]
    anew, root = opened()
    other = below(root, [11, 12, 3])
    assert offered(anew, other) == [[11, 12, 3, 11, 12, 13]]  # one that has seen nothing


def test_every_beam_has_a_place_of_its_own():
    proposer, root = opened()
    offered(proposer, root)
    far, near = below(root, [11, 12, 3]), below(root, [3])
    assert offered(proposer, far, near) == [[11, 12, 3, 14, 15, 16], [3, 12, 13, 14]]
    # both go on: the one by two copies and another token, the other by a copy
    one, two = below(far, [14, 15, 4]), below(near, [12])
    assert offered(proposer, one, two) == [[11, 12, 3, 14, 15, 4, 17, 18, 19], [3, 12, 13, 14, 15]]


def test_tokens_that_were_never_offered_are_followed_one_by_one():
    """Another beam's text, or calls with nothing ahead: each token moves the place by one."""
    proposer, root = opened()
    offered(proposer, root)
    assert offered(proposer, below(root, [11, 3, 4, 6])) == [[11, 3, 4, 6, 15, 16, 17]]


def test_drafters_that_keep_nothing_are_asked_alike():
    proposer, root = OfferedCandidates(PromptLookup(2), "cpu"), chain([5, 6, 7, 5, 6])
    assert offered(proposer, root) == [[6, 7, 5, 6, 7, 5]]
