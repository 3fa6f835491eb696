"""What a Whisper checkpoint's generation configuration says: special tokens, languages, tasks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers.models.whisper.tokenization_whisper import LANGUAGES, TO_LANGUAGE_CODE

from outrider import arguments
from outrider.errors import ConfigurationError, UnknownName, UnsupportedModel

TASKS = ("transcribe", "translate")


@dataclass(frozen=True)
class Vocabulary:
    """Special tokens. Ids of text are below `end_id`, timestamps go from `first_timestamp_id` on.

    languages, tasks      ids by code ("en") and by name; none in an English-only model
    suppress              ids that never come, and those that do not come first
    max_initial           the latest first timestamp, in steps; None: any
    alignment_heads       (layer, head) whose cross attention follows the sound; () if unknown
    """

    start_id: int
    end_id: int
    no_timestamps_id: int
    previous_id: int | None
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    suppress: tuple[int, ...] = ()
    begin_suppress: tuple[int, ...] = ()
    max_initial: int | None = 50
    alignment_heads: tuple[tuple[int, int], ...] = ()

    @property
    def multilingual(self) -> bool:
        """Whether prompts name a language and a task."""
        return bool(self.languages)

    @property
    def first_timestamp_id(self) -> int:
        """The timestamp 0.00 s."""
        return self.no_timestamps_id + 1

    @property
    def no_speech_id(self) -> int:
        """The token whose probability at the start says that nobody speaks."""
        return self.no_timestamps_id - 1

    @classmethod
    def of(cls, settings: Mapping[str, Any], name: str) -> "Vocabulary":
        """From a generation configuration as a mapping; `name` is the model's in messages.

        Raises UnsupportedModel if it lacks what transcription stands on.
        """
        needed = ("decoder_start_token_id", "eos_token_id", "no_timestamps_token_id")
        missing = [key for key in needed if settings.get(key) is None]
        if missing:
            raise UnsupportedModel(
                f"{name} has no generation configuration for transcription; got none of {missing}; "
                "take generation_config.json of the model that it was trained from"
            )
        languages = settings.get("lang_to_id") or {}
        multilingual = settings.get("is_multilingual", bool(languages))
        end = settings["eos_token_id"]
        heads = settings.get("alignment_heads") or ()
        tasks = dict(settings.get("task_to_id") or {}) if multilingual else {}
        if multilingual and "transcribe" not in tasks:
            raise UnsupportedModel(
                f"{name} has no token for the task 'transcribe'; got task_to_id={tasks}; take "
                "generation_config.json of the model that it was trained from"
            )
        return cls(
            int(settings["decoder_start_token_id"]),
            int(end[0] if isinstance(end, (list, tuple)) else end),
            int(settings["no_timestamps_token_id"]),
            settings.get("prev_sot_token_id"),
            {code.strip("<|>"): int(i) for code, i in languages.items()} if multilingual else {},
            tasks,
            tuple(settings.get("suppress_tokens") or ()),
            tuple(settings.get("begin_suppress_tokens") or ()),
            settings.get("max_initial_timestamp_index"),
            tuple((int(layer), int(head)) for layer, head in heads),
        )

    def language(self, given: str | None, name: str) -> str | None:
        """The code of a language by code, by English name or as the token; None for None.

        Raises ConfigurationError for an English-only model, UnknownName for another language.
        """
        if given is None:
            return None
        if not isinstance(given, str):
            do = 'write language="en", or None to have it detected'
            arguments.refuse("language", "the name or code of a language", given, do)
        plain = given.strip().lower().strip("<|>")
        code: str = TO_LANGUAGE_CODE.get(plain, plain)
        if not self.multilingual:
            if code == "en":
                return None
            raise ConfigurationError(
                f"{name} knows English alone; got language={given!r}; leave it out, or take a "
                "multilingual model"
            )
        if code not in self.languages:
            raise UnknownName("language of this model", given, self.languages)
        return code

    def task(self, given: str, name: str) -> str:
        """A task by its name. Raises UnknownName; ConfigurationError where there is but one."""
        if given not in TASKS:
            raise UnknownName("task", str(given), TASKS)
        if given != "transcribe" and given not in self.tasks:
            raise ConfigurationError(
                f"{name} knows English alone and does not translate; got task={given!r}; leave it "
                "out, or take a multilingual model"
            )
        return given


def language_name(code: str | None) -> str | None:
    """The English name of a language.

    >>> language_name("fr")
    'french'
    """
    return None if code is None else LANGUAGES.get(code, code)
