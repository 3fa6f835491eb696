"""A chat template of one's own stands for the tokenizer's and the processor's."""

import os

import image_folder
import pytest
from transformers.tokenization_mistral_common import MistralCommonBackend

import outrider
from outrider import SamplingParams, Stop
from outrider.cli.options import config_of
from outrider.loading import load
from outrider.models.pretrained import with_chat_template
from outrider.text.prompts import chat
from tiny import llama
from words import tokenizer as words

TEMPLATE = "{% for m in messages %}w9 {{ m.content }} {% endfor %}w10"
PLAIN = {"dtype": "float32", "threads": 1, "pack_weights": False, "drafter": "prompt_lookup"}
TALK = [{"role": "user", "content": "w7 w8"}]


@pytest.mark.parametrize("form", ["file", "path", "text"])
def test_conversations_are_written_by_it(tmp_path, form):
    file = tmp_path / "own.jinja"
    file.write_text(TEMPLATE, encoding="utf-8-sig")  # as some editors write it
    given = {"file": str(file), "path": file, "text": TEMPLATE}[form]
    bare = words()
    speculator = load(llama(), tokenizer=bare, chat_template=given, **PLAIN)
    assert bare.chat_template is None  # the caller's object is left as it is
    own = speculator.tokenizer
    assert own.chat_template == TEMPLATE
    asked = [9, 7, 8, 10]
    assert chat(own, TALK) == asked
    greedy, stop = SamplingParams(0), Stop(6)
    answer = speculator.generate([TALK], greedy, stop)
    assert answer.texts == speculator.generate([asked], greedy, stop).texts


def test_images_stand_in_it(tmp_path):
    folder = image_folder.saved(tmp_path, kind="llava")
    image = {"type": "image", "image": image_folder.picture(3)}
    talk = [{"role": "user", "content": [image, {"type": "text", "text": "what"}]}]
    told = load(folder, **PLAIN).media.conversation(talk)[0]
    own = "<image>{{ messages[0].content[1].text }}"
    other = load(folder, chat_template=own, **PLAIN).media
    assert other.chat_template is not None
    found = other.conversation(talk)[0]
    assert found != told
    whole = {"prompt": "<image>what", "multi_modal_data": {"image": image["image"]}}
    assert found == other.prompt(whole)[0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nowhere.jinja", "chat_template cannot be read; got 'nowhere.jinja'"),
        ("{% for %}", "chat_template is no template; got '{% for %}' .Expected an expression"),
        ("{{ messages | nofilter }}", "is no template; got .*No filter named 'nofilter'"),
        ("{% break %}", "is no template; got .*outside loop"),
        ({"default": TEMPLATE}, "chat_template must be a file, or the text of a template"),
        (TEMPLATE.encode(), "chat_template must be a file, or the text of a template"),
    ],
)
def test_what_is_no_template_is_refused(given, said):
    with pytest.raises(outrider.ConfigurationError, match=said):
        load(llama(), tokenizer=words(), chat_template=given, **PLAIN)


def test_a_file_without_a_template_is_refused(tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("no template", encoding="utf-8")
    with pytest.raises(outrider.ConfigurationError, match=r"no template; got '.*' without Jinja"):
        load(llama(), tokenizer=words(), chat_template=file, **PLAIN)


def test_what_reads_a_source_has_no_use_for_one():
    """A Whisper, say: nobody talks with it."""
    with pytest.raises(outrider.ConfigurationError, match="got one that reads a source beside"):
        load("corrector", chat_template=TEMPLATE, **PLAIN)


def test_a_message_of_half_a_character_is_refused_as_a_prompt_is():
    own = with_chat_template(words(), TEMPLATE)
    for role in ("system", "user"):
        with pytest.raises(outrider.PromptError, match=r"prompt 3 is not valid text.* character 3"):
            chat(own, [{"role": role, "content": "caf\udce9"}, *TALK], 3)


def test_a_tokenizer_of_mistral_common_has_no_place_for_one():
    own = object.__new__(MistralCommonBackend)
    with pytest.raises(outrider.ConfigurationError, match="mistral-common, which writes them by"):
        with_chat_template(own, TEMPLATE)


def test_commands_read_it_before_another_process_does():
    """`<(...)` of a shell is a file that this process alone has, and that is read once."""
    ends = os.pipe()
    os.write(ends[1], TEMPLATE.encode())
    os.close(ends[1])
    try:
        config = config_of({"chat_template": f"/dev/fd/{ends[0]}"})
    finally:
        os.close(ends[0])
    assert config.chat_template == TEMPLATE
    assert with_chat_template(words(), config.chat_template).chat_template == TEMPLATE


def test_without_a_tokenizer_of_transformers_there_are_no_conversations():
    for tokenizer, got in ((None, "none"), (Bytes(), "Bytes")):
        with pytest.raises(outrider.ConfigurationError, match=f"of transformers; got {got}"):
            load(llama(), tokenizer=tokenizer, chat_template=TEMPLATE, **PLAIN)


class Bytes:
    """A tokenizer that is no class of transformers'."""

    __slots__ = ()

    def __call__(self, text):
        return {"input_ids": [*text.encode()]}

    def decode(self, token_ids, *, skip_special_tokens, clean_up_tokenization_spaces):
        return bytes(token_ids).decode()

    def get_vocab(self):
        return {chr(n): n for n in range(32)}


def test_one_that_refuses_a_message_of_no_words_is_taken():
    refuses = "{{ raise_exception('say something') }}"
    speculator = load(llama(), tokenizer=words(), chat_template=refuses, **PLAIN)
    with pytest.raises(outrider.PromptError, match="say something"):
        speculator.generate([TALK])
