"""What clients of OpenAI's API ask for, asked by its own client."""

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from served import NAME, PROMPT, events, far, serving, streamed, write

from outrider import SamplingParams, Stop
from outrider.server.model_info import TextOffsets, TokenFormatter


def said(answer):
    return [choice.text for choice in answer.choices]


def test_a_text_is_the_engines_whole_or_streamed(shipped, client):
    answer = write(client, temperature=0)
    expected = shipped.generate(PROMPT, SamplingParams(0), Stop(24)).completions[0]
    assert said(answer) == [expected.text]
    assert answer.usage.completion_tokens == len(expected.token_ids)
    assert answer.usage.prompt_tokens == len(shipped.tokenizer(PROMPT)["input_ids"])
    assert answer.choices[0].finish_reason == "length"
    text, last = streamed(client, temperature=0)
    assert text == expected.text
    assert last.usage.total_tokens == answer.usage.total_tokens
    assert (
        last.model_extra["metrics"]["speculative_decoding"]
        == (answer.model_extra["metrics"]["speculative_decoding"])
    )


def test_one_seed_is_one_text_at_any_load_and_after_a_restart(shipped, server, client):
    seeds = [3, 4]
    plain = shipped.plain(shared_noise=True)
    alone = [plain.generate(PROMPT, SamplingParams(0.8, seed=s), Stop(24)).texts for s in seeds]
    assert [said(write(client, seed=s)) for s in seeds] == alone
    with ThreadPoolExecutor(5) as pool:
        others = [pool.submit(write, client, "import " + w, max_tokens=40) for w in ("os", "re")]
        beside = list(pool.map(lambda s: said(write(client, seed=s)), seeds))
        assert all(other.result().usage.completion_tokens for other in others)
    assert beside == alone
    with serving(shipped, max_num_seqs=2) as another:
        again = another.client()
        assert [streamed(again, seed=s)[0] for s in seeds] == [text for (text,) in alone]
        assert write(again, seed=3).system_fingerprint == write(client).system_fingerprint
    told = {"return_token_ids": True}
    some = write(client, seed=3, max_tokens=9, extra_body=told).choices[0]
    sent = some.model_extra["prompt_token_ids"] + some.model_extra["token_ids"]
    assert some.text + said(write(client, sent, seed=3, max_tokens=15))[0] == alone[0][0]


def test_several_completions_of_several_prompts(shipped, client):
    prompts = [PROMPT, "import os\n"]
    every = write(client, prompts, seed=3, n=2, max_tokens=12, stop=["\n\n\n"])
    assert every.usage.prompt_tokens == sum(len(shipped.tokenizer(p)["input_ids"]) for p in prompts)
    assert [choice.index for choice in every.choices] == [0, 1, 2, 3]
    single = [said(write(client, p, seed=s, max_tokens=12))[0] for p in prompts for s in (3, 4)]
    assert [text.split("\n\n\n")[0] for text in single] == said(every)
    parts = {}
    for chunk in write(client, prompts, seed=3, n=2, max_tokens=12, stream=True):
        for choice in chunk.choices:
            parts[choice.index] = parts.get(choice.index, "") + choice.text
    assert [parts[index] for index in range(4)] == single


def test_a_prompt_that_others_began_with_is_copied(shipped):
    with serving(shipped) as server:
        client = server.client()
        words = "import os\nimport re\n\n\n" + PROMPT * 3
        first = write(client, words, seed=3)
        read = first.usage.prompt_tokens
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        again, last = streamed(client, words, seed=3)
        assert again == said(first)[0]
        assert last.usage.prompt_tokens_details.cached_tokens == read - 1
        more = write(client, words + said(first)[0], seed=5, n=3)
        assert more.usage.prompt_tokens > read
        assert read - 1 <= more.usage.prompt_tokens_details.cached_tokens < 2 * read
        usages = [first.usage, last.usage, more.usage]
        page = urllib.request.urlopen(server.address + "/metrics").read().decode()
    told = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert f'prefix_cache_hits_total{{model_name="pair"}} {float(sum(told))}' in page
    with serving(shipped, prefix_cache_bytes=0) as server:
        alike = [write(server.client(), words, seed=3) for _ in range(2)]
        assert [said(answer) for answer in alike] == [said(first)] * 2
        assert alike[1].usage.prompt_tokens_details.cached_tokens == 0


def test_stop_strings_and_tokens_cut_text_tokens_and_usage(shipped, client):
    whole = write(client, seed=3, logprobs=0)
    tokens = whole.choices[0].logprobs.tokens
    end = tokens[8]
    cut = write(client, seed=3, stop=end, logprobs=0)
    text = said(whole)[0]
    assert said(cut)[0] == text[: text.index(end)]
    assert cut.choices[0].finish_reason == "stop"
    assert cut.usage.completion_tokens == len(cut.choices[0].logprobs.tokens) < len(tokens)
    ids = shipped.tokenizer(text)["input_ids"]
    ended = write(client, seed=3, extra_body={"stop_token_ids": [ids[5]]})
    assert ended.choices[0].finish_reason == "stop"
    assert text.startswith(said(ended)[0])


def test_stop_strings_wait_for_min_tokens(client):
    whole = write(client, seed=3, logprobs=0, max_tokens=12)
    tokens, text = whole.choices[0].logprobs.tokens, said(whole)[0]
    first = tokens[0]  # which would end the text at once
    cut = write(client, seed=3, stop=first, max_tokens=12, extra_body={"min_tokens": 3})
    assert said(cut)[0].startswith("".join(tokens[:3]))
    assert said(write(client, seed=3, stop=first, max_tokens=12))[0] == ""
    for least in range(len(tokens)):
        early = {"extra_body": {"min_tokens": least}, "max_tokens": 12}
        end = tokens[least]
        cut = write(client, seed=3, stop=end, **early)
        before = "".join(tokens[:least])  # one that ends in these is text
        assert said(cut)[0] == text[: text.index(end, max(len(before) - len(end) + 1, 0))]
        streamed = write(client, seed=3, stop=end, stream=True, **early)
        assert "".join(one.choices[0].text for one in streamed) == said(cut)[0]


def test_another_chat_template_is_another_fingerprint(shipped, client, monkeypatch):
    own = write(client, max_tokens=1).system_fingerprint
    monkeypatch.setattr(shipped.tokenizer, "chat_template", "{{ messages[0].content }}")
    with serving(shipped) as server:
        assert write(server.client(), max_tokens=1).system_fingerprint != own


def test_log_probabilities_are_the_models_own(shipped, client):
    answer = write(client, seed=5, max_tokens=10, logprobs=3)
    logs = answer.choices[0].logprobs
    assert "".join(logs.tokens) == answer.choices[0].text
    assert logs.text_offset[0] == 0
    ids = shipped.tokenizer(PROMPT)["input_ids"]
    plain = shipped.plain(shared_noise=True)
    tokens = plain.generate(PROMPT, SamplingParams(0.8, seed=5), Stop(10)).completions[0].token_ids
    law = teacher_forced(shipped, ids, tokens)
    expected = law[range(10), tokens].tolist()
    assert logs.token_logprobs == pytest.approx(expected, abs=1e-3)
    best = law.topk(3).values
    found = [sorted(place.values(), reverse=True)[:3] for place in logs.top_logprobs]
    assert max(map(len, logs.top_logprobs)) == 4  # the token's own beside them
    assert found == [pytest.approx(row, abs=1e-3) for row in best.tolist()]
    flowed = []
    for chunk in write(client, seed=5, max_tokens=10, logprobs=3, stream=True):
        flowed += [log for choice in chunk.choices for log in choice.logprobs.token_logprobs]
    assert flowed == pytest.approx(expected, abs=1e-3)


def test_offsets_are_those_of_the_text(shipped):
    """Where characters are several tokens, too, whole or from any token on."""
    words, text = TokenFormatter(shipped.tokenizer), "x = '😀漢字é' # 日本語 🚀"
    ids = shipped.tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = [words.bytes_of(token) for token in ids]
    assert any(piece.decode("utf-8", "replace").endswith("\ufffd") for piece in pieces)
    read = [b"".join(pieces[:at]).decode("utf-8", "ignore") for at in range(len(ids))]
    offsets = TextOffsets(words).since(ids, 0, len(ids))
    assert offsets == [len(before) for before in read]
    for count in (1, 2, 3):
        grows = TextOffsets(words)
        for since in range(0, len(ids), count):
            told = grows.since(ids[: since + count], since, count)
            assert told == offsets[since : since + count]


def teacher_forced(speculator, prompt, tokens):
    """The target's log-probabilities [n, V] ahead of each token."""
    from outrider.models.prefill import causal

    target = speculator.engine.target
    ids = torch.tensor([[*prompt, *tokens]])
    at = torch.arange(ids.shape[1])[None]
    with torch.inference_mode():
        nodes = causal(ids, at, ids.shape[1])
        logits = target.forward(target.open(1, ids.shape[1] + 8), nodes).logits_BQV[0]
    return logits.float().log_softmax(-1)[len(prompt) - 1 : -1]


def test_a_prediction_is_copied_and_changes_no_text(client):
    plain = write(client, seed=3, max_tokens=40)
    prediction = {"type": "content", "content": said(plain)[0]}
    copied = write(client, seed=3, max_tokens=40, extra_body={"prediction": prediction})
    assert said(copied) == said(plain)
    steps = copied.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"]
    assert steps <= 40 / 4
    details = copied.usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 40
    assert details.rejected_prediction_tokens == 0
    wrong = {"type": "content", "content": "x = 1\ny = 2\n" * 8}
    other = write(client, seed=3, max_tokens=40, extra_body={"prediction": wrong})
    assert said(other) == said(plain)
    assert other.usage.completion_tokens_details.rejected_prediction_tokens > 20


def test_a_prediction_is_counted_wherever_its_tokens_are(client):
    """And as often as the answer has them: of one that says everything twice, half."""
    plain = write(client, seed=3, max_tokens=40)
    twice = {"type": "content", "content": said(plain)[0] * 2}
    details = write(
        client, seed=3, max_tokens=40, extra_body={"prediction": twice}
    ).usage.completion_tokens_details
    assert details.accepted_prediction_tokens == 40
    assert 35 <= details.rejected_prediction_tokens <= 45  # a token may lie across the middle


def test_a_schema_is_followed_with_drafts_and_without(client):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 10},
            "age": {"type": "integer", "minimum": 0, "maximum": 999},
            "kind": {"enum": ["alpha", "beta"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    texts = set()
    for method in ("default", "none", "coupled"):
        body = {"response_format": wanted, "speculative_config": {"method": method}}
        answer = write(client, "# JSON:\n", seed=4, max_tokens=80, extra_body=body)
        thing = json.loads(said(answer)[0])
        assert set(thing) == {"name", "age", "kind"}
        assert thing["kind"] in ("alpha", "beta")
        assert answer.choices[0].finish_reason == "stop"
        if method != "default":
            texts.add(said(answer)[0])
    assert len(texts) == 1
    body = {"guided_regex": "[0-9]{4}-[0-9]{2}"}
    assert len(said(write(client, "date = ", temperature=1, extra_body=body))[0]) == 7


def test_a_conversation_goes_through_the_template(shipped, client, monkeypatch):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(shipped.tokenizer, "chat_template", template)
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "def f(x):"}]},
    ]
    options = {"model": NAME, "max_completion_tokens": 12, "seed": 3, "temperature": 0.8}
    answer = client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=2, **options
    )
    text = "system: Be brief.\nuser: def f(x):\n"
    ids = shipped.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer.choices[0].message.content == said(write(client, ids, seed=3, max_tokens=12))[0]
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(content)
    flowed = client.chat.completions.create(messages=messages, stream=True, **options)
    parts = [choice.delta for chunk in flowed for choice in chunk.choices]
    assert parts[0].role == "assistant"
    assert "".join(part.content or "" for part in parts) == answer.choices[0].message.content


def test_a_chunk_for_every_token_and_events_of_one_size(server):
    body = {
        "model": NAME,
        "prompt": PROMPT,
        "seed": 3,
        "max_tokens": 16,
        "stream": True,
        "stream_options": {"chunk_tokens": 1, "include_trace": True},
        "return_token_ids": True,
    }
    sizes, texts = [], []
    for event in events(server, body):
        sizes.append(len(event))
        if event != "[DONE]":
            texts.append(json.loads(event)["choices"][0]["text"])
            assert len(json.loads(event)["choices"][0]["token_ids"]) == 1
    assert event == "[DONE]"
    assert len(texts) == 16
    assert all(size % 64 == 0 for size in sizes[:-1])
    body["stream_options"] = {"include_obfuscation": False, "continuous_usage_stats": True}
    whole = [json.loads(event) for event in events(server, body) if event != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in whole) == "".join(texts)
    assert all("obfuscation" not in chunk for chunk in whole)
    told = [chunk["usage"]["completion_tokens"] for chunk in whole]
    assert told == sorted(told)
    assert told[-1] == 16


@pytest.mark.one_in(2)
@pytest.mark.parametrize("opened", [serving, far], ids=["here", "across a pipe"])
def test_counters_equal_the_sum_of_the_answers(shipped, opened):
    began = time.monotonic()
    with opened(shipped, prefix="vllm:") as server:
        client = server.client()
        with pytest.raises(openai.InternalServerError):  # nothing of its prompt is read
            write(client, extra_body={"timeout": 1e-9})
        answers = [write(client, seed=s, max_tokens=20, n=1 + s % 2) for s in range(3)]
        _, last = streamed(client, seed=9, stop="return")
        page = urllib.request.urlopen(server.address + "/metrics").read().decode()
    assert 'request_success_total{finished_reason="error",model_name="pair"} 1.0' in page
    assert 'finished_reason="cancelled"' not in page
    usages = [answer.usage for answer in answers] + [last.usage]
    metrics = [answer.model_extra["metrics"]["speculative_decoding"] for answer in [*answers, last]]
    told = {}
    for line in page.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            told[name.split("{")[0]] = told.get(name.split("{")[0], 0) + float(value)
    assert told["vllm:generation_tokens_total"] == sum(u.completion_tokens for u in usages)
    assert told["vllm:prompt_tokens_total"] == sum(u.prompt_tokens for u in usages)
    for name, field in (
        ("num_drafts", "num_spec_steps"),
        ("num_draft_tokens", "num_draft_tokens"),
        ("num_accepted_tokens", "num_accepted_draft_tokens"),
        ("num_accepted_tokens_per_pos", "num_accepted_draft_tokens"),
    ):
        assert told[f"vllm:spec_decode_{name}_total"] == sum(one[field] for one in metrics)
    assert told["vllm:request_success_total"] == sum(len(a.choices) for a in answers) + 2
    assert told["vllm:num_requests_running"] == told["vllm:kv_cache_usage_perc"] == 0
    choices = sum(len(answer.choices) for answer in answers) + 1
    steps = sum(one["num_spec_steps"] for one in metrics)
    assert told["vllm:request_prefill_time_seconds_count"] == choices
    assert told["vllm:inter_token_latency_seconds_count"] == steps - choices
    spent = (
        told["vllm:request_prefill_time_seconds_sum"] + told["vllm:request_queue_time_seconds_sum"]
    )
    assert spent == pytest.approx(told["vllm:time_to_first_token_seconds_sum"])
    taken = told["vllm:step_seconds_count"]
    assert max(one["num_spec_steps"] for one in metrics) <= taken
    assert taken <= sum(one["num_spec_steps"] for one in metrics)  # rows share them
    assert told["vllm:iteration_tokens_total_count"] == told["vllm:planner_nodes_count"] == taken
    assert 0 < told["vllm:step_seconds_sum"] < time.monotonic() - began


@pytest.mark.one_in(2)
@pytest.mark.parametrize("opened", [serving, far], ids=["here", "across a pipe"])
def test_steps_are_counted_with_all_that_they_wrote_and_read(shipped, opened):
    """One row at a time: a step is a step of its answer, and every token is in one of them."""
    with opened(shipped, max_num_seqs=1) as server:
        client = server.client()
        answers = [write(client, seed=s, max_tokens=20) for s in range(3)]
        plain = {"speculative_config": {"method": "none"}}
        answers.append(write(client, seed=3, max_tokens=20, extra_body=plain))
        page = urllib.request.urlopen(server.address + "/metrics").read().decode()
    metrics = [answer.model_extra["metrics"]["speculative_decoding"] for answer in answers]
    steps = sum(one["num_spec_steps"] for one in metrics)
    lines = [line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("outrider:")]
    told = {name.replace('{model_name="pair"}', ""): float(value) for name, value in lines}
    for name in ("step_seconds", "iteration_tokens_total", "planner_nodes"):
        assert told[f"outrider:{name}_count"] == steps
    written = sum(answer.usage.total_tokens for answer in answers)
    assert told["outrider:iteration_tokens_total_sum"] == written
    drafted = sum(one["num_draft_tokens"] for one in metrics)
    assert told["outrider:planner_nodes_sum"] == drafted + steps


def test_models_health_and_page(server, client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.models.retrieve("other")
    health = json.load(urllib.request.urlopen(server.address + "/health"))
    assert health == {"status": "ok", "running": 0, "waiting": 0}
    page = urllib.request.urlopen(server.address + "/")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert b"playground" in page.read()
