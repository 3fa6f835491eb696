"""A model family of your own: a Llama that counts its positions itself, and what drives it."""

from contextlib import contextmanager

from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from outrider.models import TransformersRunner
from outrider.models.model_lock import alone


class CountingConfig(LlamaConfig):
    """A Llama's."""

    model_type = "counting_llama"


class CountingForCausalLM(LlamaForCausalLM):
    """Takes positions and does not read them: a token's place is how many came before it.

    That is right for text that only grows. In a draft tree two children of one node have the same
    place, so the plain runner's trees are wrong here.
    """

    config_class = CountingConfig
    places = None  #: what the runner below says for the time of a call

    def forward(self, input_ids=None, position_ids=None, logits_to_keep=0, **more):
        return super().forward(
            input_ids=input_ids, position_ids=self.places, logits_to_keep=logits_to_keep, **more
        )


class CountingRunner(TransformersRunner):
    """For the time of one call the positions are those of the tree."""

    @contextmanager
    def around(self, keys_BW, positions_BQ, visible_BQW):
        with alone(self.model):  # another thread may call the same model plainly
            self.model.places = positions_BQ
            try:
                yield
            finally:
                self.model.places = None


AutoConfig.register("counting_llama", CountingConfig, exist_ok=True)
AutoModelForCausalLM.register(CountingConfig, CountingForCausalLM, exist_ok=True)
