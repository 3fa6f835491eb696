"""`outrider plan`: what steps will cost on a machine, and where speculation stops paying."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.table import Table

from outrider import arguments
from outrider.cli import options, typed_values
from outrider.cli.console import bar, out
from outrider.costs import Sizes
from outrider.errors import ConfigurationError

if TYPE_CHECKING:
    from outrider.models.sources import ModelSource
    from outrider_lab.tasks.chooser import ChoiceRequest
    from outrider_lab.theory.capacity import Drafting, Machine

#: Parameters of what --prompts does, and of it as well as of a plan; all others are a plan's.
OF_PROMPTS = ("draft", "limit", "new_tokens", "temperature")
OF_BOTH = ("model", "dtype", "threads", "prompts", "trust_remote_code", "as_json")
UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}


def number(option: str, given: str | None) -> float | None:
    """ "3.35T" to 3.35e12. Raises ConfigurationError for what is none, or not above 0."""
    if given is None:
        return None
    text = given.strip()
    unit = text[-1:].upper() if text[-1:].isalpha() else ""
    if unit == "B" and option == "--parameters":  # billions, as sizes of models are said
        unit = "G"
    try:
        value = float(text.removesuffix(text[-1:]) if unit else text) * UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not 0 < value < math.inf:
        what = "a number above 0, with K, M, G, T or P for thousands of thousands"
        arguments.refuse(option, what, given, f"write {option} 3.35T")
    return value


Overlap = Annotated[
    bool,
    typer.Option(
        "--overlap/--no-overlap",
        help="Whether the device computes while it reads: a GPU does, a processor core not.",
    ),
]


def plan(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="A model's folder or hub name, for its sizes.")
    ] = None,
    model_bytes: Annotated[str | None, typer.Option(help="Of all weights, e.g. 14G.")] = None,
    kv_bytes: Annotated[
        str | None, typer.Option(help="Of the cache, for one token of one row, e.g. 131K.")
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Such as 7B. Default: 2 bytes of weights for each.")
    ] = None,
    layers: Annotated[int, typer.Option(min=0, help="For all-reduces: two a layer.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Of the model by name. Default: the checkpoint's.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of a device's memory, bytes a second, e.g. 3.35T.")
    ] = None,
    flops: Annotated[
        str | None, typer.Option(help="Of a device, operations a second, e.g. 600T.")
    ] = None,
    cache_bandwidth: Annotated[
        str | None, typer.Option(help="At which attention reads the cache. Default: --bandwidth.")
    ] = None,
    attention_flops: Annotated[
        str | None, typer.Option(help="At which attention computes. Default: --flops.")
    ] = None,
    devices: Annotated[int, typer.Option(min=1, help="That hold a part of the model each.")] = 1,
    all_reduce: Annotated[float, typer.Option(min=0, help="One of them, microseconds.")] = 0.0,
    host: Annotated[float, typer.Option(min=0, help="Besides, milliseconds a step.")] = 0.0,
    host_row: Annotated[float, typer.Option(min=0, help="The same for every row.")] = 0.0,
    host_node: Annotated[float, typer.Option(min=0, help="The same for every node.")] = 0.0,
    host_draft: Annotated[
        float, typer.Option(min=0, help="The same for a step with drafts.")
    ] = 0.0,
    overlap: Overlap = True,
    rows: Annotated[str, typer.Option(help="Rows of a batch.")] = "1,2,4,8,16,32,64",
    nodes: Annotated[str, typer.Option(help="Nodes of a row: drafted tokens and 1.")] = "1,3,5,9",
    contexts: Annotated[str, typer.Option(help="Tokens behind which a step is.")] = "256,2048,8192",
    acceptance: Annotated[
        float, typer.Option(help="Chance that a drafted token is kept, in [0, 1].")
    ] = 0.8,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Find the rates of this processor, with the model named."),
    ] = False,
    threads: Annotated[int | None, typer.Option(min=1, help="Of --measure and --prompts.")] = None,
    draft_bytes: Annotated[
        str | None, typer.Option(help="Weights of a draft model on one device. Default: none.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Your own, JSON lines or plain lines: which drafter pays, by category."),
    ] = None,
    draft: Annotated[
        str | None, typer.Option("--draft-model", help="Of --prompts: a draft to try as well.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Of --prompts: as many of a category.")] = 3,
    new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", min=1, help="Of --prompts: of each answer.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", min=0, help="Of --prompts.")
    ] = 0.0,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.AsJson = False,
) -> None:
    """What steps cost by rows, context and drafted nodes, and where speculation stops paying.

    With --prompts instead: drafters on your own prompts, and which one pays for which of them.

    outrider plan --model-bytes 14G --kv-bytes 131K --bandwidth 3.35T --flops 600T
    outrider plan HuggingFaceTB/SmolLM2-135M-Instruct --measure --threads 1
    outrider plan HuggingFaceTB/SmolLM2-135M-Instruct --prompts mine.jsonl --threads 1
    """
    _used(context, prompts is not None, measure)
    if prompts is not None:
        if model is None:
            raise ConfigurationError(
                f"prompts are tried with a model; got --prompts {prompts} and none; name one"
            )
        from outrider_lab.tasks.chooser import ChoiceRequest

        how = dtype or "auto", threads or 1, trust_remote_code
        asked = ChoiceRequest(model, draft, prompts, limit, new_tokens, temperature, *how)
        _choose(asked, as_json)
        return
    from outrider.resolve_config import seen
    from outrider_lab.theory import capacity
    from outrider_lab.theory.capacity import Drafting

    source = None
    if model is not None:
        source = seen(model, trust_remote_code=trust_remote_code)
    sizes = _sizes(source, dtype, model_bytes, kv_bytes, parameters, layers)
    given = _Rates(
        bandwidth,
        flops,
        cache_bandwidth,
        attention_flops,
        host,
        host_row,
        host_node,
        host_draft,
        overlap,
    )
    machine = _measured(source, dtype, threads, sizes, given) if measure else _told(given)
    machine = machine._replace(devices=devices, all_reduce=1e-6 * all_reduce)
    capacity.check(sizes, machine)
    small_bytes = number("--draft-bytes", draft_bytes)
    small = None if small_bytes is None else Sizes(small_bytes, 0.0, small_bytes / 2)
    if not 0 <= acceptance <= 1:
        arguments.refuse("--acceptance", "a number in [0, 1]", acceptance, "try 0.8")
    found = _found(
        sizes,
        machine,
        _counts("--rows", rows),
        _counts("--nodes", nodes),
        _counts("--contexts", contexts),
        Drafting(0, acceptance, small),
    )
    if as_json:
        sys.stdout.write(json.dumps(found) + "\n")
        return
    _print(found)


def _used(context: typer.Context, tries: bool, measures: bool) -> None:
    """Refuse options that what is asked for does not read."""
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if source is None or source.name != "COMMANDLINE" or option.name in OF_BOTH:
            continue
        flag = max(option.opts, key=len)
        if tries and option.name not in OF_PROMPTS:
            raise ConfigurationError(
                f"--prompts tries drafters and makes no plan; got {flag} as well; leave one out"
            )
        if not tries and option.name in OF_PROMPTS:
            raise ConfigurationError(
                f"{flag} is of --prompts; got it without; give --prompts FILE, or leave {flag} out"
            )
    if context.params["threads"] is not None and not (tries or measures):
        raise ConfigurationError(
            f"--threads is of --measure and --prompts; got {context.params['threads']} without; "
            "give one of these, or leave it out"
        )


def _choose(asked: "ChoiceRequest", as_json: bool) -> None:
    """Try drafters on prompts, and say which one pays."""
    from outrider_lab.papers.record import console, table
    from outrider_lab.tasks import chooser

    with bar("plan") as progress:
        found, advice = chooser.run(asked, progress)
    if as_json:
        sys.stdout.write(json.dumps(found | {"advice": advice}) + "\n")
        return
    title = (
        f"times plain decoding's speed, {asked.new_tokens} tokens each, T = {asked.temperature:g}"
    )
    console.print(table(title, found["drafters"]))
    console.print(advice, markup=False)


def _sizes(
    model: "ModelSource | None",
    dtype: str | None,
    model_bytes: str | None,
    kv_bytes: str | None,
    parameters: str | None,
    layers: int,
) -> Sizes:
    """By name, by numbers, or by name with some numbers in place of its own."""
    from outrider.models.runtime_config import WEIGHTS
    from outrider_lab.flops import sizes as sizes_of

    if dtype is not None and (model is None or dtype not in WEIGHTS):
        do = f"use one of {', '.join(WEIGHTS)}, and name a model"
        arguments.refuse("--dtype", "that of a model given by name", dtype, do)
    weights, cache = number("--model-bytes", model_bytes), number("--kv-bytes", kv_bytes)
    count = number("--parameters", parameters)
    if model is not None:
        known = sizes_of(model, dtype)
        return Sizes(
            weights or known.weight_bytes,
            cache or known.kv_bytes,
            count or known.parameters,
            layers or known.layers,
            known.attention,
        )
    if weights is None or cache is None:
        raise ConfigurationError(
            f"a plan needs a model's sizes; got --model-bytes {model_bytes} and --kv-bytes "
            f"{kv_bytes}; give both, or a model's folder"
        )
    return Sizes(weights, cache, count or weights / 2, layers)


class _Rates(NamedTuple):
    """What is said of the machine."""

    bandwidth: str | None = None
    flops: str | None = None
    cache_bandwidth: str | None = None
    attention_flops: str | None = None
    host: float = 0.0
    host_row: float = 0.0
    host_node: float = 0.0
    host_draft: float = 0.0
    overlap: bool = True

    def given(self) -> list[str]:
        """The options that were used."""
        usual = _Rates()._asdict()
        used = [name for name, value in self._asdict().items() if value != usual[name]]
        return [f"--{name.replace('_', '-')}" for name in used]


def _told(rates: _Rates) -> "Machine":
    from outrider_lab.theory.capacity import Machine

    return Machine(
        _needed("--bandwidth", rates.bandwidth, "3.35T"),
        _needed("--flops", rates.flops, "600T"),
        number("--cache-bandwidth", rates.cache_bandwidth),
        number("--attention-flops", rates.attention_flops),
        host=1e-3 * rates.host,
        host_row=1e-3 * rates.host_row,
        host_node=1e-3 * rates.host_node,
        host_draft=1e-3 * rates.host_draft,
        overlaps=rates.overlap,
    )


def _measured(
    model: "ModelSource | None", dtype: str | None, threads: int | None, sizes: Sizes, rates: _Rates
) -> "Machine":
    """This processor's rates with this model."""
    from outrider.models import TreeDecoder
    from outrider_lab.bench.machine import load_to_measure
    from outrider_lab.bench.rates import measured

    if model is None or rates.given():
        got = "no model" if model is None else ", ".join(rates.given())
        raise ConfigurationError(
            f"rates are measured with a model, or given; got --measure and {got}; name a model, "
            "and leave rates out"
        )
    kind = dtype or model.checkpoint_dtype()
    loaded = load_to_measure(
        model.given,
        drafter="suffix",
        dtype=kind,
        device="cpu",
        threads=threads or "auto",
        trust_remote_code=model.trust,
    )
    target = loaded.engine.target
    if not isinstance(target, TreeDecoder):
        raise ConfigurationError(
            f"--measure runs a decoder in one process; got {type(target).__name__}; give the rates"
        )
    return measured(target, sizes)


def _needed(option: str, given: str | None, example: str) -> float:
    value = number(option, given)
    if value is None:
        raise ConfigurationError(
            f"a plan needs the machine's rates; got no {option}; write {option} {example}"
        )
    return value


def _counts(option: str, given: str) -> tuple[int, ...]:
    counts = typed_values.numbers(option, given, int, "1,2,4") or ()
    if not counts or min(counts) < 1:
        arguments.refuse(option, "positive numbers separated by commas", given, "try 1,2,4")
    return tuple(sorted(set(counts)))


def _found(
    sizes: Sizes,
    machine: "Machine",
    rows: tuple[int, ...],
    nodes: tuple[int, ...],
    contexts: tuple[int, ...],
    drafting: "Drafting",
) -> dict[str, Any]:
    """The whole plan, milliseconds and rows; None stands for infinity."""
    from outrider_lab.theory import capacity

    def finite(value: float) -> float | None:
        return None if math.isinf(value) else value

    each = {name: 1e3 * value for name, value in capacity.parts(sizes, machine)._asdict().items()}
    found = []
    for context in contexts:
        chains = [drafting._replace(tokens=n - 1) for n in nodes if n > 1]
        steps = [[1e3 * capacity.step(sizes, machine, b, n, context) for n in nodes] for b in rows]
        found.append(
            {
                "context": context,
                "cache_ms_a_row": context * each["token"],
                "step_ms": steps,
                "compute_bound_from": {
                    str(n): finite(capacity.compute_bound(sizes, machine, n, context))
                    for n in nodes
                },
                "pays_until": {
                    str(chain.tokens + 1): finite(
                        capacity.pays_until(sizes, machine, context, chain)
                    )
                    for chain in chains
                },
            }
        )
    return {
        "sizes": sizes._asdict(),
        "machine": machine._asdict(),
        "parts_ms": each,
        "acceptance": drafting.acceptance,
        "rows": rows,
        "nodes": nodes,
        "contexts": found,
    }


def _print(found: dict[str, Any]) -> None:
    each, machine = found["parts_ms"], found["machine"]
    how = "computes while it reads" if machine["overlaps"] else "reads, then computes"
    if machine["products"] is not None:
        how = "products as they were measured"
    out.print(
        f"weights {each['weights']:.3g} ms a step, products {each['node']:.3g} ms a node, "
        f"all-reduces {each['reduces']:.3g} ms a step, host {each['host']:.3g} ms a step; "
        f"{how}",
        markup=False,
    )
    for at in found["contexts"]:
        table = Table(
            title=f"ms of a step behind {at['context']} tokens "
            f"({at['cache_ms_a_row']:.3g} ms of cache a row)"
        )
        table.add_column("rows", justify="right")
        for n in found["nodes"]:
            table.add_column("plain" if n == 1 else f"{n} nodes", justify="right")
        for b, line in zip(found["rows"], at["step_ms"], strict=True):
            table.add_row(str(b), *(f"{ms:.2f}" for ms in line))
        table.add_section()
        bound, pays = at["compute_bound_from"].values(), at["pays_until"]
        table.add_row("compute-bound from", *(_rows(b, "never", "any") for b in bound))
        ends = [
            _rows(pays[str(n)], "any", "none") if str(n) in pays else "" for n in found["nodes"]
        ]
        table.add_row(f"pays up to (at {found['acceptance']:g})", *ends)
        out.print(table)


def _rows(value: float | None, infinite: str, below_one: str) -> str:
    """A number of rows; None is infinity."""
    if value is None:
        return infinite
    return f"{value:.0f}" if value >= 1 else below_one
