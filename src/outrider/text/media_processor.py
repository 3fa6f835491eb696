"""Conversations and prompts with images or sound, by the model's own processor."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider import arguments
from outrider.errors import (
    AudioError,
    ConfigurationError,
    OutriderError,
    PromptError,
    first_line,
    kind_of,
)
from outrider.models import pretrained
from outrider.models.config import found
from outrider.text.images import MOST_BYTES, from_base64, open_image
from outrider.types import MultiModalInputs
from outrider.types.models import PER_TOKEN, ImageAhead

if TYPE_CHECKING:
    from outrider.speech.audio import Recording

MOST_PARTS = 64  #: images and recordings of one prompt
MOST_SECONDS = 3600.0  #: of a recording in a prompt: a small file may hold much silence
_IMAGE = ("image", "image_url")
_AUDIO = ("audio", "input_audio", "audio_url")
_VIDEO = ("video", "video_url", "input_video")
_IDS = ("input_ids", "attention_mask", "labels")  #: what no prompt has beside it
#: Processors that cut a recording off behind their extractor's window without a word.
_CUT_OFF = ("Qwen2AudioProcessor", "Qwen2_5OmniProcessor")
_RATE = 16_000  #: samples per second, where a feature extractor does not say
_HOST = torch.device("cpu")  #: where a processor makes tensors, whatever the caller's default is


def has_media(prompt: object) -> bool:
    """Whether a prompt is a conversation in which images or sound stand beside the text.

    >>> has_media([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])
    True
    """
    if isinstance(prompt, (str, bytes)) or not isinstance(prompt, Sequence):
        return False
    parts = (part for turn in prompt if isinstance(turn, Mapping) for part in _parts(turn))
    return any(part.get("type") in (*_IMAGE, *_AUDIO, *_VIDEO) for part in parts)


def _parts(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, (str, bytes)) or not isinstance(content, Sequence):
        return []
    return [part for part in content if isinstance(part, Mapping)]


@dataclass(frozen=True)
class MediaProcessor:
    """What turns conversations with images or sound into token ids and what stands beside them.

    given         the processor of transformers, or the folder or hub name that has one
    placeholders  token ids that stand for images and sound in prompts

    The processor is read when it is first needed.
    """

    given: Any
    placeholders: frozenset[int]
    trust: bool = False
    pixels_alone: bool = False  #: of an encoder that reads one image and no text
    text_alone: bool = False  #: of an encoder that reads a text with an image, or without
    recordings_alone: bool = False  #: of an encoder that hears a recording and no text
    moment: int = 0  #: samples of a recording that one token is read with; 0: with all of them
    closers: frozenset[int] = frozenset()  #: token ids that belong to an image ahead of them
    template: str | None = None  #: a chat template that stands for the processor's own
    ahead: ImageAhead | None = None  #: what the processor leaves to be put ahead of a prompt

    @cached_property
    def processor(self) -> Any:
        """transformers' own. Raises ConfigurationError where there is none."""
        if self.given is None:
            raise ConfigurationError(
                "images and sound need the model's processor; got a model object without one; "
                "load the model from its folder, or pass tokenizer=processor"
            )
        if not isinstance(self.given, (str, Path)):
            return self.given
        try:
            return pretrained.read_processor(str(self.given), self.trust, self.pixels_alone)
        except OutriderError:
            raise
        except Exception as error:  # of whatever file or package it lacks
            raise ConfigurationError(
                f"cannot read the processor of {self.given} ({kind_of(error)}); images need its "
                "preprocessor_config.json and Pillow (pip install 'outrider[images]'), sound the "
                "same and numpy; processors that know videos (Qwen-VL's and their kin) need "
                "torchvision, whatever they are given"
            ) from error

    @property
    def chat_template(self) -> object:
        """What conversations are rendered by; None where there is no processor, or it has none."""
        try:
            return self.template or found(self.processor, "chat_template")
        except ConfigurationError:
            return None

    def pixels(self, given: object, number: int = 0) -> Any:
        """Pixels [C, H, W] of one image, or its patches [P, E], for an encoder that reads one.

        Raises PromptError for an image that the processor does not take.
        """
        image = open_image(given)
        reader = found(self.processor, "image_processor") or self.processor
        try:
            with _HOST:
                made = reader(images=image, return_tensors="pt")
            if "flattened_patches" not in made:
                return made["pixel_values"][0]
            return made["flattened_patches"][0][made["attention_mask"][0].bool()]
        except Exception as error:  # a processor is a program of its own
            raise PromptError(
                f"the model's processor does not take the image of prompt {number}: "
                f"{type(error).__name__}: {first_line(error)}; give another image"
            ) from error

    def conversation(
        self, messages: Sequence[Any], number: int = 0, template: Mapping[str, Any] | None = None
    ) -> tuple[list[int], MultiModalInputs]:
        """Token ids of a conversation with images or sound, opening the assistant's next turn.

        Parts of a message are those of transformers and of OpenAI's clients: text, image (`image`,
        `path` or `url`), image_url, audio and input_audio.
        """
        turns, count = [], 0
        for message in messages:
            turn = dict(message)
            if _parts(message):
                turn["content"] = [self._part(part, number) for part in _parts(message)]
                count += sum(part["type"] != "text" for part in turn["content"])
            elif isinstance(turn.get("content"), str):  # templates with parts want parts alone
                turn["content"] = [{"type": "text", "text": turn["content"]}]
            turns.append(turn)
        if count > MOST_PARTS:
            raise PromptError(
                f"prompt {number} has {count} images and recordings; at most {MOST_PARTS} are "
                "read; ask about fewer at once"
            )
        more: dict[str, Any] = {"add_generation_prompt": True, **(template or {})}
        if self.template is not None:
            more["chat_template"] = self.template
        return self.made(
            lambda: self.processor.apply_chat_template(
                turns, tokenize=True, return_dict=True, return_tensors="pt", **more
            ),
            f"the conversation of prompt {number}",
        )

    def prompt(
        self, given: Mapping[str, Any], number: int = 0
    ) -> tuple[list[int], MultiModalInputs]:
        """A text with placeholders, and its images and sound, as vLLM takes them.

        `{"prompt": "<image>\\nWhat is it?", "multi_modal_data": {"image": [...], "audio": [...]}}`
        """
        data = given.get("multi_modal_data")
        text = given.get("prompt")
        if not isinstance(text, str) or not isinstance(data, Mapping) or not data:
            raise PromptError(
                f"prompt {number} is a mapping without a text and its images; got "
                f"{sorted(map(str, given))}; write {{'prompt': ..., 'multi_modal_data': {{'image': "
                "...}}}}"
            )
        strange = sorted(map(str, set(data) - {"image", "audio"}))
        if strange:
            raise PromptError(
                f"multi_modal_data has image and audio; got {', '.join(strange)} in prompt "
                f"{number}; leave it out"
            )
        asked: dict[str, Any] = {"text": [text], "return_tensors": "pt"}
        if "image" in data:
            asked["images"] = [open_image(one) for one in _several(data["image"])]
        if "audio" in data:
            asked["audio"] = [self._heard(one, number) for one in _several(data["audio"])]
        return self.made(lambda: self.processor(**asked), f"prompt {number}")

    def ready(
        self, given: Mapping[str, Any], number: int = 0
    ) -> tuple[list[int], MultiModalInputs | None]:
        """What a processor made of one prompt: its token ids, and what stands beside them.

        Raises PromptError for a batch of several, and for one that is padded.
        """
        ids = given["input_ids"]
        rows: Any = ids.tolist() if isinstance(ids, arguments.Listable) else list(ids)
        if rows and not isinstance(rows[0], (list, tuple)):
            rows = [rows]
        if len(rows) != 1:
            raise PromptError(
                f"prompt {number} is one prompt's input_ids [1, L]; got {len(rows)} rows; give one "
                "prompt each, as the processor makes them of one"
            )
        seen = given.get("attention_mask")
        if seen is not None and not bool(torch.as_tensor(seen, device="cpu").bool().all()):
            raise PromptError(
                f"prompt {number} has padding; got an attention_mask with zeros; have the "
                "processor make each prompt alone"
            )
        beside = {
            name: value
            if isinstance(value, (list, tuple, torch.Tensor))
            else torch.as_tensor(value, device="cpu")
            for name, value in given.items()
            if name not in _IDS and value is not None
        }
        typed = {name for name, value in beside.items() if name.endswith("token_type_ids")}
        if not set(beside) - typed:  # text alone
            return list(rows[0]), None
        ids = list(rows[0])
        if self.ahead is not None:  # tensors by token are of no other ids than the processor's
            ids = self.ahead.of(ids, beside.get("pixel_values"))
            beside = {name: value for name, value in beside.items() if name not in PER_TOKEN}
        return ids, MultiModalInputs(beside, self.placeholders, self.closers)

    def made(self, call: Any, what: str) -> tuple[list[int], MultiModalInputs]:
        """What the processor makes of a prompt with images or sound."""
        self.processor  # noqa: B018  (its absence has an error of its own)
        try:
            with _HOST:
                given = call()
            ids, inputs = self.ready(given)
        except OutriderError:
            raise
        except Exception as error:  # a processor is a program of its own, as its template is
            raise PromptError(
                f"the model's processor does not take {what}: {type(error).__name__}: "
                f"{first_line(error)}; it may read no images, or no sound, or want a placeholder "
                "for each"
            ) from error
        if inputs is None:
            raise PromptError(
                f"the model's processor left the images or sound of {what} out; its chat template "
                "may have no place for them; give a prompt with placeholders"
            )
        return ids, inputs

    def _part(self, part: Mapping[str, Any], number: int) -> dict[str, Any]:
        """A part of a message as transformers' processors read it."""
        kind = part.get("type")
        if kind == "text":
            return {"type": "text", "text": part.get("text", "")}
        if kind in _IMAGE:
            return {"type": "image", "image": open_image(_content(part, "image"))}
        if kind in _AUDIO:
            return {"type": "audio", "audio": self._heard(_content(part, "audio"), number)}
        if kind in _VIDEO:
            raise PromptError(
                f"videos in messages are not read; got a part of type {kind!r} in prompt {number}; "
                "give some of its frames as images, or what the model's own processor makes of it"
            )
        raise PromptError(
            f"parts of a message are text, image, image_url, audio and input_audio; got "
            f"{kind!r} in prompt {number}; leave it out"
        )

    @property
    def _extractor(self) -> Any:
        """What makes features of sound; None where nothing does."""
        names = ("feature_extractor", "audio_processor")
        makers = (found(self.processor, name) for name in names)
        alone = self.processor if self.recordings_alone else None
        return next((one for one in makers if one is not None), alone)

    @property
    def reads_sound(self) -> bool:
        """Whether prompts may hold sound; False where there is no processor."""
        if self.pixels_alone or self.recordings_alone:
            return False
        try:
            return self._extractor is not None
        except ConfigurationError:
            return False

    @property
    def rate(self) -> int:
        """Samples per second that the model hears."""
        return int(found(self._extractor, "sampling_rate") or _RATE)

    @property
    def most_seconds(self) -> float:
        """Of a recording in a prompt."""
        if type(self.processor).__name__ in _CUT_OFF:
            return float(self.processor.feature_extractor.n_samples / self.rate)
        return MOST_SECONDS

    def _heard(self, given: Any, number: int) -> Any:
        """A recording's samples at the rate that the model hears."""
        from outrider.speech import audio

        rate = self.rate
        if isinstance(given, (bytes, bytearray)):
            with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
                path = Path(folder) / "recording"
                path.write_bytes(given)
                try:
                    return self._whole(audio.look(path, number, None, rate))
                except AudioError as error:  # of a file that nobody has named
                    raise AudioError(str(error).replace(str(path), "the recording")) from error
        return self._whole(audio.look(given, number, None, rate))

    def _whole(self, recording: "Recording") -> Any:
        """All of its samples. Raises AudioError for more than is heard."""
        if recording.seconds > self.most_seconds:
            raise AudioError(
                f"{recording.name} has {recording.seconds:.1f} s of sound; at most "
                f"{self.most_seconds:g} s of a recording are heard in a prompt; cut it, and give "
                "the pieces one by one"
            )
        return recording.read(self.rate)


def audio_bytes(data: object, most: int = MOST_BYTES) -> bytes:
    """The bytes of a recording that `input_audio` has in base64. Raises AudioError.

    >>> audio_bytes("aGk=")
    b'hi'
    """
    if not isinstance(data, str):
        raise AudioError(
            f"input_audio has a file in base64; got {type(data).__name__}; encode the file's bytes"
        )
    if len(data) > 4 * most // 3 + 4:
        raise AudioError(f"a recording has at most {most} bytes; got more; send a shorter one")
    return from_base64(data, "input_audio", AudioError)


def _several(given: Any) -> list[Any]:
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _content(part: Mapping[str, Any], kind: str) -> Any:
    """What a part of a message holds, whoever's form it has."""
    for name in (kind, "path", "url", f"{kind}_url", f"input_{kind}", "base64"):
        held = part.get(name)
        if isinstance(held, Mapping) and "url" in held:
            held = held["url"]
        if name == "input_audio" and isinstance(held, Mapping) and "data" in held:
            held = audio_bytes(held["data"])
        if held is not None:
            return held
    raise PromptError(
        f"a part of type {part.get('type')!r} has no {kind}; got {sorted(map(str, part))}; write "
        f'{{"type": "{kind}", "{kind}": path}}'
    )
