"""The stages of a day on a card, in order of worth, and how long one command may stay in each."""

from typing import NamedTuple

RESTART = 75  #: a worker's exit code: the device is lost to this process, a new one goes on


class Stage(NamedTuple):
    """A stage: its module here has `items(card)`; its results go to `<name>.json`."""

    name: str
    seconds: int  #: bound of one command
    about: str


STAGES = (
    Stage("environment", 60, "what the machine is, and its ceilings"),
    Stage("correctness", 420, "tests on the device, race and memory checkers, laws"),
    Stage("verification", 420, "one verification against all contestants"),
    Stage("end_to_end", 480, "generation: plain, speculative, transformers' own"),
    Stage("pretrained", 240, "a trained model: its texts are transformers', and how fast"),
    Stage("server", 240, "the server under 1, 8 and 16 clients"),
    Stage("paper", 240, "Wagner et al.'s protocol in half precision"),
    Stage("growth", 240, "context, drafted tokens, vocabulary"),
)
