"""`outrider bench peers`."""

import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider import arguments
from outrider.cli.console import Show, bar
from outrider.cli.gathered import gathered
from outrider.errors import ConfigurationError
from outrider_lab.certify.report import Row
from outrider_lab.drawing import pyplot
from outrider_lab.papers import options
from outrider_lab.papers.options import RESULTS
from outrider_lab.papers.record import Store, console, folder, table
from outrider_lab.peers import page
from outrider_lab.peers.engines import FASTER_WHISPER, LLAMA, OPENVINO, TRANSFORMERS, VLLM

EVERY = (LLAMA, OPENVINO, TRANSFORMERS, VLLM, FASTER_WHISPER)


@dataclass(frozen=True)
class PeersRequest:
    """Models, engines and how much, as they were asked for."""

    model: Annotated[
        list[Path] | None,
        typer.Option("--model", "-m", help="GGUF file, or a model's folder; may be repeated."),
    ] = None
    draft: Annotated[
        Path | None, typer.Option("--draft-model", help="GGUF file, for ours and llama.cpp.")
    ] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Types to write GGUF files of, e.g. Q8_0,BF16. Default: a file as it is, Q8_0 of "
            "a folder."
        ),
    ] = None
    whisper: Annotated[Path | None, typer.Option(help="A Whisper's folder.")] = None
    converted: Annotated[
        Path | None, typer.Option(help="The same Whisper in CTranslate2's format.")
    ] = None
    whisper_draft: Annotated[str, typer.Option(help="Of the Whisper; '' for none.")] = (
        "whisper-base-draft"
    )
    recordings: Annotated[
        Path | None, typer.Option(help="Folder of recordings with transcripts.")
    ] = None
    peer: Annotated[
        str | None, typer.Option(help="A Python that has the other engines. Default: this one.")
    ] = None
    engines: Annotated[
        str | None, typer.Option(help="Only these, e.g. llama.cpp,transformers. Default: all.")
    ] = None
    modes: Annotated[
        str | None, typer.Option(help="llama.cpp's n-gram modes. Default: all four.")
    ] = None
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each of six kinds.")] = 4
    new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=2, help="Of each answer.")
    ] = 64
    count: Annotated[int, typer.Option(min=1, help="Recordings.")] = 10
    clients: Annotated[
        str | None,
        typer.Option(
            help="Servers in place of single prompts, under so many clients at once, e.g. 1,4,8,16."
        ),
    ] = None
    rounds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Of servers, which take turns. Of single prompts: calls of ours, the fastest of "
            "which is held against plain decoding's.",
        ),
    ] = 3
    first_start: Annotated[
        bool, typer.Option(help="Start ours once with an empty cache: it compiles and measures.")
    ] = True
    cores: Annotated[
        str | None, typer.Option(help="That all are pinned to, e.g. 0 or 0,1. Default: the first.")
    ] = None
    dtype: Annotated[str, typer.Option(help="Of our side, of text. Recordings: int8 for auto.")] = (
        "auto"
    )
    page: Annotated[
        Path | None, typer.Option(help="Markdown of all runs in --out. Default: peers.md in it.")
    ] = None

    def pinned(self) -> tuple[int, ...]:
        """The cores."""
        every = range(os.cpu_count() or 1)
        there = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(every)
        if self.cores is None:
            return (min(there),)
        try:
            found = tuple(sorted({int(one) for one in self.cores.split(",")}))
        except ValueError:
            found = ()
        if not found or not there.issuperset(found):
            do = f"try --cores {min(there)}"
            arguments.refuse("--cores", f"some of {sorted(there)}", self.cores, do)
        return found

    def at_once(self) -> tuple[int, ...]:
        """How many clients; () for no servers."""
        if self.clients is None:
            return ()
        found = [int(one) for one in self.clients.split(",") if one.strip().isdecimal()]
        if not found or min(found) < 1 or len(found) != self.clients.count(",") + 1:
            do = "try --clients 1,4,8,16"
            arguments.refuse("--clients", "numbers of at least 1", self.clients, do)
        if importlib.util.find_spec("openai") is None:
            raise ConfigurationError(
                "servers are asked by OpenAI's client; got a Python without it; "
                f"{sys.executable} -m pip install openai"
            )
        return tuple(sorted(set(found)))

    def wanted(self) -> tuple[str, ...] | None:
        """Names of the other engines that are asked for; None: all."""
        if self.engines is None:
            return None
        names = tuple(name.strip() for name in self.engines.split(","))
        known = {one.name for one in EVERY}
        if not set(names) <= known:
            do = "separate names by commas"
            arguments.refuse("--engines", f"some of {sorted(known)}", self.engines, do)
        return names


@gathered("asked", PeersRequest)
def peers(
    asked: PeersRequest,
    out: options.Out = RESULTS,
    quick: Annotated[
        bool, typer.Option("--quick", help="One prompt of each kind, 32 tokens, 3 recordings.")
    ] = False,
    pictures: options.Pictures = True,
) -> None:
    """Ours beside llama.cpp, OpenVINO GenAI, transformers, vLLM and faster-whisper, in turn.

    What is not installed is left out with the sentence that installs it. Runs into the same --out
    become sections of one page.
    """
    if not asked.model and asked.whisper is None:
        raise ConfigurationError(
            "nothing to measure; got neither --model nor --whisper; give a GGUF file, or a "
            "Whisper's folder with --recordings"
        )
    folder(out)
    if pictures:
        pyplot()
    cores, wanted, clients = asked.pinned(), asked.wanted(), asked.at_once()
    python = asked.peer or sys.executable
    there: dict[str, str] = {}
    absent: dict[str, str] = {}
    for one in EVERY:
        if wanted is not None and one.name not in wanted:
            continue
        where = sys.executable if one is TRANSFORMERS else python
        version = one.version(where)
        if version is None:
            absent[one.name] = one.missing(where)
        else:
            there[one.name] = version
    settings: Row = {
        "cores": list(cores),
        "tokens": 32 if quick else asked.new_tokens,
        "limit": 1 if quick else asked.limit,
        "caps": page.capped(),
        "dtype": asked.dtype,
        "versions": there,
    }
    store = Store(out, "peers", settings)
    with bar("peers") as progress:
        for given, path in _files(asked, out):
            if clients:
                told = clients, cores, there, absent
                _servers(asked, given, path, *told, store, progress, quick)
            else:
                _text(asked, path, cores, there, absent, store, progress, quick)
        if asked.whisper is not None:
            _speech(asked, cores, there, absent, store, progress, quick)
    target = asked.page or out / "peers.md"
    page.write(out, target, pictures)
    for name, found in page.sections(out).items():
        for title, rows in found["tables"].items():
            if rows:
                console.print(table(f"{name}: {title}", rows))
    for sentence in absent.values():
        console.print(f"left out: {sentence}", markup=False)
    console.print(f"written to {target}", markup=False)


def _files(asked: PeersRequest, out: Path) -> list[tuple[Path, Path]]:
    """What was given and the GGUF files that are read, written where a type or a folder was asked
    for."""
    from outrider_lab.peers import gguf_files

    found = []
    for given in asked.model or ():
        types = asked.weights.split(",") if asked.weights else ["Q8_0"] if given.is_dir() else []
        for kind in types:
            found.append((given, gguf_files.written(given, folder(out / "gguf"), kind)))
        if not types:
            found.append((given, given))
    return found


def _name(title: str) -> str:
    """Of a section: its title, and whether a cap was set, as a file's name."""
    capped = " capped" if page.capped() else ""
    return re.sub(r"[^a-z0-9]+", "-", f"{title}{capped}".lower()).strip("-")


def _modes(asked: PeersRequest, usual: tuple[str, ...]) -> tuple[str, ...]:
    """llama.cpp's drafts that were asked for."""
    return usual if asked.modes is None else tuple(filter(None, asked.modes.split(",")))


def _text(
    asked: PeersRequest,
    path: Path,
    cores: tuple[int, ...],
    there: dict[str, str],
    absent: dict[str, str],
    store: Store,
    progress: Show,
    quick: bool,
) -> None:
    """Measure one file, and keep its section."""
    from outrider_lab.peers import gguf_files, text
    from outrider_lab.tasks import prompts

    names = tuple(name for name in there if name not in (FASTER_WHISPER.name, VLLM.name))
    modes = _modes(asked, text.MODES)
    tokens = 32 if quick else asked.new_tokens
    request = text.TextRequest(
        path, asked.draft, sys.executable, asked.peer or sys.executable, names, modes, cores,
        asked.dtype, tokens, asked.first_start, 1 if quick else asked.rounds,
    )  # fmt: skip
    tasks = prompts.tasks(1 if quick else asked.limit)
    tokenizer = gguf_files.tokenizer(path)
    load = os.getloadavg()[0]
    found = text.run(
        request,
        [(task.kind, prompts.token_ids(tokenizer, task.turns)) for task in tasks],
        store,
        progress,
    )
    one = found.steps[1]
    steps = ", ".join(f"{n} nodes {ms:.1f} ms ({ms / one:.2f})" for n, ms in found.steps.items())
    first = found.starts.get("first")
    cold = (
        ""
        if first is None
        else f" Its first start, with an empty cache, takes {first['wall']:.1f} s "
        f"({first['cpu']:.1f} of the processor)."
    )
    llama = found.starts.get(text.LLAMA_PLAIN, {}).get("means")
    built = f" llama.cpp says of its build: {llama}." if llama else ""
    title, by_clock = text.title_of(path), ""
    if request.threads > 1:
        title += f", {request.threads} cores"
        by_clock = " Compared by the clock, with as many threads."
    about = (
        f"{len(tasks)} prompts of six kinds, {tokens} tokens each, cores {_listed(cores)}; the "
        f"worst prompt by the fastest of {request.rounds} calls.{by_clock} Ours runs as "
        f"{found.starts[text.PLAIN]['means']}.{cold} Steps of it: {steps}."
        f"{built}"
    )
    section = page.section(
        f"{title}{', capped' if page.capped() else ''}",
        {"all prompts": text.table(found), "ms a token by kind": text.by_kind(found)},
        absent_of(absent, FASTER_WHISPER.name, VLLM.name) | found.left_out,
        there,
        about,
        (load, os.getloadavg()[0]),
    )
    page.keep(store.folder, _name(title), section)


def _servers(
    asked: PeersRequest,
    given: Path,
    path: Path,
    clients: tuple[int, ...],
    cores: tuple[int, ...],
    there: dict[str, str],
    absent: dict[str, str],
    store: Store,
    progress: Show,
    quick: bool,
) -> None:
    """Measure the servers of one file, and keep their section."""
    from outrider_lab.peers import gguf_files, servers, text
    from outrider_lab.tasks import prompts

    modes = _modes(asked, ("NGRAM_SIMPLE",))
    tokens = 32 if quick else asked.new_tokens
    request = servers.ServersRequest(
        path, given if given.is_dir() else None, sys.executable, asked.peer or sys.executable,
        tuple(there), clients, modes, cores, asked.dtype, tokens, 1 if quick else asked.rounds,
    )  # fmt: skip
    tasks = prompts.tasks(1 if quick else asked.limit)
    tokenizer, load = gguf_files.tokenizer(path), os.getloadavg()[0]
    ids = [prompts.token_ids(tokenizer, task.turns) for task in tasks]
    found = servers.run(request, ids, store, progress)
    gone = absent_of(absent, FASTER_WHISPER.name, OPENVINO.name, TRANSFORMERS.name)
    if VLLM.name in there and request.folder is None:
        gone[VLLM.name] = "it reads a model's folder; give --model FOLDER"
    title = f"{text.title_of(path)}, servers{', capped' if page.capped() else ''}"
    about = (
        f"{len(tasks)} prompts of six kinds, {tokens} tokens each, rounds: {request.rounds}, asked "
        f"by OpenAI's client, cores {_listed(cores)} for servers (clients where they like). "
        "Greedy, prompts are read anew. Processor time is that of the server and its processes."
    )
    section = page.section(
        title,
        {"by clients": servers.table(found)},
        gone | found.left_out,
        there,
        about,
        (load, os.getloadavg()[0]),
    )
    page.keep(store.folder, _name(f"{text.title_of(path)} servers"), section)


def _speech(
    asked: PeersRequest,
    cores: tuple[int, ...],
    there: dict[str, str],
    absent: dict[str, str],
    store: Store,
    progress: Show,
    quick: bool,
) -> None:
    """Measure a Whisper, and keep its section."""
    from outrider_lab.peers import speech
    from outrider_lab.recordings import read_folder

    assert asked.whisper is not None
    if asked.recordings is None:
        raise ConfigurationError(
            "a Whisper is measured on recordings; got --whisper without --recordings; give a "
            "folder with transcripts"
        )
    recordings = read_folder(asked.recordings)[: 3 if quick else asked.count]
    request = speech.SpeechRequest(
        asked.whisper,
        asked.whisper_draft or None,
        asked.converted,
        sys.executable,
        asked.peer or sys.executable,
        tuple(there),
        cores=cores,
        dtype="int8" if asked.dtype == "auto" else asked.dtype,
    )
    load = os.getloadavg()[0]
    found = speech.run(request, recordings, store, progress)
    gone = absent_of(absent, LLAMA.name, OPENVINO.name, VLLM.name) | found.left_out
    if asked.converted is None:
        gone[FASTER_WHISPER.name] = "no --converted: ct2-transformers-converter writes one"
    title = asked.whisper.name
    section = page.section(
        f"{title}{', capped' if page.capped() else ''}",
        {"all recordings": speech.table(found)},
        gone,
        there,
        f"{len(recordings)} recordings, {sum(found.minutes):.1f} minutes, English, no timestamps, "
        f"cores {_listed(cores)}.",
        (load, os.getloadavg()[0]),
    )
    page.keep(store.folder, _name(title), section)


def _listed(cores: tuple[int, ...]) -> str:
    """As --cores takes them."""
    return ",".join(map(str, cores))


def absent_of(absent: dict[str, str], *others: str) -> dict[str, str]:
    """What is missing but for engines that do another kind of work."""
    return {name: why for name, why in absent.items() if name not in others}
