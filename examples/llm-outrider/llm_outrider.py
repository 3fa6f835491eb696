"""A plug-in for the `llm` tool: `llm -m outrider -o target MODEL 'A question'`."""

from collections.abc import Iterator
from functools import lru_cache

import llm
from llm.parts import TextPart
from pydantic import Field

import outrider
from outrider import SamplingParams, Stop

_MOST = 512  #: tokens of an answer where nobody says


@llm.hookimpl
def register_models(register) -> None:
    """One model, whose option `target` says which."""
    register(Outrider())


@lru_cache(maxsize=1)
def loaded(target: str | None) -> outrider.Speculator:
    """The target with its draft; it stays for the next turn of a conversation."""
    return outrider.load(target)


class Outrider(llm.Model):
    """A model of Hugging Face, decoded speculatively."""

    model_id = "outrider"
    can_stream = True

    class Options(llm.Options):
        """What can be said with `-o`."""

        target: str | None = Field(None, description="A folder or a name on the Hub")
        max_tokens: int | None = Field(None, ge=1, description="Most tokens of an answer")
        temperature: float | None = Field(None, ge=0, description="0 is greedy")
        top_p: float | None = Field(None, gt=0, le=1, description="1 is off")
        seed: int | None = Field(None, ge=0, description="Same seed, same answer")

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """The answer's text as it comes, and how it was decoded."""
        asked = prompt.options
        speculator = loaded(asked.target)
        sampling = SamplingParams(
            0.7 if asked.temperature is None else asked.temperature,
            top_p=asked.top_p or 1.0,
            seed=asked.seed,
        )
        text = _text(speculator, prompt)
        running = speculator.stream([text], sampling, Stop(asked.max_tokens or _MOST))
        for block in running:
            yield block.text
        stats = running.result().completions[0].stats
        response.set_usage(input=stats.prompt_tokens, output=stats.new_tokens)
        response.response_json = {"speculative_decoding": stats.as_dict()}


def _text(speculator: outrider.Speculator, prompt: llm.Prompt) -> str | list[dict[str, str]]:
    """The prompt as a model goes on from it: turns of a talk, or plain text."""
    turns = [
        {
            "role": message.role,
            "content": "".join(part.text for part in message.parts if isinstance(part, TextPart)),
        }
        for message in prompt.messages
    ]
    if speculator.tokenizer is not None and speculator.tokenizer.chat_template is not None:
        return turns
    if len(turns) > 1:
        raise llm.ModelError(
            "this model goes on from text and knows no conversation; leave out the system prompt "
            "and earlier turns, or take an instruct model: -o target ..."
        )
    return prompt.prompt
