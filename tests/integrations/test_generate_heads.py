"""`model.generate` with a folder of a head beside the model."""

import pytest
import torch

from outrider.errors import ConfigurationError
from outrider.integrations.generate import SpeculativeGenerate, speculative
from tiny_heads import eagle3, original, speculators, target


@pytest.mark.one_in(3)
@pytest.mark.parametrize("layout", [speculators, original])
@pytest.mark.parametrize("settings", [{}, {"branching": (2, 2)}, {"drafter": "dynamic_tree"}])
def test_greedy_text_is_the_models_own(tmp_path, layout, settings):
    model, folder = target(), layout(tmp_path, eagle3((2, 3, 3)))
    ids = torch.tensor([[0, 0, 5, 9], [7, 3, 11, 4], [0, 2, 2, 8]])
    given = {"attention_mask": (ids > 0).long(), "max_new_tokens": 12, "do_sample": False}
    own = model.generate(ids, **given, pad_token_id=0)
    call = SpeculativeGenerate(draft_model=str(folder), **settings)
    assert torch.equal(model.generate(ids, **given, pad_token_id=0, custom_generate=call), own)
    assert call.stats.drafted
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach())  # read anew
    own = model.generate(ids, **given, pad_token_id=0)
    assert torch.equal(model.generate(ids, **given, pad_token_id=0, custom_generate=call), own)


def test_a_head_that_does_not_fit_is_refused(tmp_path):
    folder = speculators(tmp_path, eagle3((2, 3, 3)))
    with pytest.raises(ConfigurationError, match=r"states of layers \(2, 3, 3\)"):
        target(3).generate(
            torch.tensor([[5, 9]]),
            custom_generate=speculative,
            draft_model=str(folder),
            max_new_tokens=2,
        )
