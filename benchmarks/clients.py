"""Clients of OpenAI's API against a running server: tools, agents, schemas, streams, scores.

    outrider serve --model MODEL --port 8123 &
    python benchmarks/clients.py http://127.0.0.1:8123 --calls 20

Calls that are not demanded are as good as the model: Qwen2.5-Coder writes plain JSON in their stead
(`--tool-call-parser json`). A server of a Whisper is asked for `--recording`'s text by

    python benchmarks/clients.py http://127.0.0.1:8124 --only openai_transcriptions \\
      --recording talk.wav

What is not installed is left out with a sentence. The clients may be in an environment of their
own, without outrider: pip install openai litellm langchain-openai langgraph instructor llm
llama-index-llms-openai-like 'lm-eval[api]' jsonschema.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import urllib.request
from pathlib import Path

from loopback import past_proxies

CITIES = (
    "Paris Rome Oslo Lima Cairo Delhi Tokyo Seoul Quito Bern Prague Athens Dublin Havana Nairobi "
    "Vienna Warsaw Madrid Lisbon Ankara"
).split()
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "Name of the city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
FUNCTION = {
    "name": "get_weather",
    "description": "Get the weather forecast of a city",
    "parameters": SCHEMA,
}
TOOL = {"type": "function", "function": FUNCTION}


def question(city):
    return f"What is the weather in {city}, in celsius? Use the tool."


class Clients:
    """Each method asks by one client and returns what there is to say of it, or raises."""

    def __init__(self, server, model, calls, recording=None):
        self.url, self.model, self.calls = server + "/v1", model, calls
        self.recording = recording

    def _openai(self):
        import openai

        return openai.OpenAI(base_url=self.url, api_key="none", timeout=600, max_retries=0)

    def openai_tools(self):
        """Calls that must come, asked for alternately whole and streamed."""
        return self._calls(tool_choice="required", parallel_tool_calls=False)

    def openai_unforced_tools(self):
        """`tool_choice` left out: each call that the model chose to write parses and validates."""
        return self._calls()

    def _calls(self, **asked):
        import jsonschema

        client, called, right = self._openai(), 0, 0
        for number in range(self.calls):
            city = CITIES[number % len(CITIES)]
            made = client.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": question(city)}],
                tools=[TOOL],
                temperature=0,
                max_tokens=160,
                stream=number % 2 == 1,
                **asked,
            )
            for name, arguments in _streamed(made) if number % 2 else _whole(made):
                jsonschema.validate(json.loads(arguments), SCHEMA)
                assert name == FUNCTION["name"]
                called += 1
                right += json.loads(arguments)["city"] == city
        assert called >= self.calls, f"{called} calls for {self.calls} questions"
        return f"{called} calls of {self.calls} questions parse and validate, {right} name the city"

    def openai_transcriptions(self):
        """A recording, whole in two formats, and as a stream."""
        if self.recording is None:
            return "left out, it needs --recording and a server of a Whisper"
        client, sound = self._openai(), Path(self.recording)
        about = {"model": self.model, "language": "en"}
        ask = client.audio.transcriptions.create
        text = ask(file=sound, **about).text
        told = ask(file=sound, response_format="verbose_json", **about)
        assert told.text.strip() == text.strip()
        events = [*ask(file=sound, stream=True, **about)]
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == text
        return f"{text!r}, {len(told.segments)} segments, {len(events)} events"

    def openai_parse(self):
        """A pydantic model as a schema."""
        from pydantic import BaseModel

        class Place(BaseModel):
            city: str
            country: str

        done = self._openai().chat.completions.parse(
            model=self.model,
            messages=[{"role": "user", "content": "Where is the Eiffel tower?"}],
            response_format=Place,
            temperature=0,
        )
        return repr(done.choices[0].message.parsed)

    def openai_responses(self):
        """Text, the next turn by `previous_response_id`, a stream, a call."""
        client = self._openai()
        about = {"model": self.model, "temperature": 0, "max_output_tokens": 60}
        first = client.responses.create(input="Name a colour in one word.", **about)
        again = client.responses.create(
            input="And another one.", previous_response_id=first.id, **about
        )
        with client.responses.stream(input="Name a colour in one word.", **about) as stream:
            events = list(stream)
        assert events[-1].response.output_text == first.output_text
        tool = {"type": "function", **FUNCTION}
        must = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
        called = client.responses.create(input=question("Oslo"), **must, **about)
        (call,) = [one for one in called.output if one.type == "function_call"]
        return (
            f"{first.output_text!r}, {again.output_text!r}, {len(events)} events, {call.arguments}"
        )

    def litellm(self):
        """A call, and a stream."""
        import litellm

        asked = {"model": "openai/" + self.model, "api_base": self.url, "api_key": "none"}
        asked |= {"temperature": 0, "max_tokens": 100}
        said = [{"role": "user", "content": question("Lima")}]
        made = litellm.completion(
            messages=said, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, **asked
        )
        ((_, arguments),) = _whole(made)
        parts = litellm.completion(messages=said, stream=True, **asked)
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        return f"{arguments}; streamed {len(text)} characters"

    def langchain_openai(self):
        """`bind_tools`: a call that must come, and an answer that has read the tool's."""
        from langchain_core.messages import HumanMessage, ToolMessage
        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI

        @tool
        def get_weather(city: str) -> str:
            """Get the weather forecast of a city."""
            return f"It is 17 degrees and raining in {city}."

        model = ChatOpenAI(
            model=self.model, base_url=self.url, api_key="none", temperature=0, max_tokens=100
        )
        must = {"tool_choice": "required", "parallel_tool_calls": False}
        talk = [HumanMessage(question("Oslo"))]
        first = model.bind_tools([get_weather], **must).invoke(talk)
        assert first.tool_calls, first
        talk.append(first)
        talk += [
            ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
            for call in first.tool_calls
        ]
        last = model.bind_tools([get_weather]).invoke(talk)
        return f"{first.tool_calls[0]['args']}, then {last.content!r}"

    def langgraph(self):
        """An agent of two steps: it asks for a tool unforced, and answers by what that has said.

        A model of half a billion parameters would ask for the tool for ever, so the second step is
        a schema.
        """
        import warnings

        from langchain_core.tools import tool
        from langchain_openai import ChatOpenAI

        warnings.filterwarnings("ignore", message="create_react_agent has been moved")
        from langgraph.prebuilt import create_react_agent

        @tool
        def get_weather(city: str) -> str:
            """Get the weather forecast of a city."""
            return f"It is 17 degrees and raining in {city}."

        fields = {"degrees": {"type": "integer"}, "rain": {"type": "boolean"}}
        schema = {"type": "object", "properties": fields, "required": [*fields]}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
        model = ChatOpenAI(
            model=self.model, base_url=self.url, api_key="none", temperature=0, max_tokens=120
        )

        def step(state, runtime):
            told = state["messages"][-1].type == "tool"
            if told:
                return model.bind(response_format=form)
            return model.bind_tools([get_weather])

        agent = create_react_agent(step, [get_weather])
        asked = {"messages": [("user", "What is the weather in Oslo?")]}
        said = agent.invoke(asked, {"recursion_limit": 8})["messages"]
        assert [message.type for message in said] == ["human", "ai", "tool", "ai"], said
        assert json.loads(said[-1].content) == {"degrees": 17, "rain": True}, said[-1].content
        calls = [(call["name"], call["args"]) for call in said[1].tool_calls]
        return f"{calls}, then {said[-1].content}"

    def llama_index(self):
        """A chat, and a function that it predicts a call of."""
        from llama_index.core.tools import FunctionTool
        from llama_index.llms.openai_like import OpenAILike

        def get_weather(city: str) -> str:
            """Get the weather forecast of a city."""
            return f"It is 17 degrees and raining in {city}."

        model = OpenAILike(
            model=self.model,
            api_base=self.url,
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            temperature=0,
            max_tokens=100,
        )
        tool = FunctionTool.from_defaults(fn=get_weather)
        made = model.chat_with_tools([tool], user_msg=question("Lima"), tool_required=True)
        (call, *_) = model.get_tool_calls_from_response(made)
        return f"{call.tool_name}({call.tool_kwargs})"

    def instructor(self):
        """A pydantic model by TOOLS mode."""
        import instructor
        from pydantic import BaseModel, Field

        class Person(BaseModel):
            name: str
            age: int = Field(ge=0, le=150)

        client = instructor.from_openai(self._openai(), mode=instructor.Mode.TOOLS)
        person = client.chat.completions.create(
            model=self.model,
            messages=[{"role": "user", "content": "Anna is 31 years old."}],
            response_model=Person,
            temperature=0,
            max_retries=0,
        )
        return repr(person)

    def llm(self):
        """Its models of OpenAI's kind, with a tool."""
        from llm.default_plugins.openai_models import Chat

        def get_weather(city: str) -> str:
            """Get the weather forecast of a city."""
            return f"It is 17 degrees and raining in {city}."

        model = Chat(
            "served", model_name=self.model, api_base=self.url, supports_tools=True, key="none"
        )
        chain = model.chain(
            question("Oslo"), tools=[get_weather], key="none", options={"temperature": 0}
        )
        return repr(chain.text())

    def lm_eval(self):
        """A task of its own, scored by log-probabilities of echoed prompts."""
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        rows = [
            ("The capital of France is", " Paris", " Rome"),
            ("The capital of Italy is", " Rome", " Paris"),
            ("2 + 2 =", " 4", " 7"),
            ("def add(a, b):\n    return a", " + b", " Paris"),
        ]
        with tempfile.TemporaryDirectory() as folder:
            lines = [json.dumps({"q": q, "right": r, "wrong": w}) for q, r, w in rows]
            Path(folder, "rows.jsonl").write_text("\n".join(lines))
            task = f"""
task: facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/rows.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{[right, wrong]}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""
            Path(folder, "facts.yaml").write_text(task)
            arguments = (
                f"model={self.model},base_url={self.url}/completions,num_concurrent=1,"
                "tokenizer_backend=remote,tokenized_requests=True,max_retries=1"
            )
            done = simple_evaluate(
                "local-completions",
                model_args=arguments,
                tasks=["facts"],
                task_manager=TaskManager(include_path=folder, include_defaults=False),
                bootstrap_iters=0,
            )
        return str(done["results"]["facts"])


#: What each needs besides its own name.
NEEDS = {
    "openai_tools": ("openai", "jsonschema"),
    "openai_unforced_tools": ("openai", "jsonschema"),
    "openai_transcriptions": ("openai",),
    "openai_parse": ("openai",),
    "openai_responses": ("openai",),
    "langgraph": ("langgraph", "langchain_openai"),
    "instructor": ("instructor", "openai"),
    "llama_index": ("llama_index.llms.openai_like",),
}


def _whole(made):
    calls = made.choices[0].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls]


def _streamed(chunks):
    calls = {}
    for chunk in chunks:
        for one in chunk.choices:
            for call in one.delta.tool_calls or []:
                name, arguments = calls.get(call.index, ("", ""))
                name += call.function.name or ""
                calls[call.index] = (name, arguments + (call.function.arguments or ""))
    return list(calls.values())


def _missing(names):
    def there(name):
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            return False

    return [name for name in names if not there(name)]


def main():
    past_proxies()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="for example http://127.0.0.1:8000")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--only", nargs="*", help="some of the clients")
    parser.add_argument("--recording", help="a sound file, for a server of a Whisper")
    asked = parser.parse_args()
    os.environ |= {"OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the network
    with urllib.request.urlopen(asked.server + "/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    clients, failed = Clients(asked.server, model, asked.calls, asked.recording), 0
    every = [name for name in vars(Clients) if not name.startswith("_")]
    for name in asked.only or every:
        missing = _missing(NEEDS.get(name, (name,)))
        if missing:
            print(f"{name}: left out, {', '.join(missing)} is not installed")
            continue
        try:
            print(f"{name}: {getattr(clients, name)()}", flush=True)
        except Exception as error:
            failed += 1
            print(f"{name}: FAILED, {type(error).__name__}: {str(error)[:400]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
