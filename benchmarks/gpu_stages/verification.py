"""One verification against all contestants: right before timed, targets first, the grid last."""

from typing import Any

import contestants
import torch
import verify
from inputs import make

from gpu_stages.card import Card
from gpu_stages.plan import Item

Shape = tuple[int, int, int, str, bool]

#: What docs/kernels.md has targets for: these come first, cold and warm.
TARGETS: list[Shape] = [
    (1, 5, 151_936, "bf16", False), (1, 5, 32_000, "bf16", False), (8, 5, 151_936, "bf16", False),
    (64, 5, 151_936, "bf16", False), (1, 20, 256_000, "bf16", False),
    (1, 5, 151_936, "fp32", False), (64, 20, 256_000, "bf16", False),
]  # fmt: skip
#: Elements of a slice, and warps, that are tried where many rows fill the machine.
GEOMETRIES = [(8192, 8), (8192, 4), (4096, 4), (16_384, 8), (2048, 4)]
GEOMETRIES_AT: list[Shape] = [(64, 5, 151_936, "bf16", False), (8, 5, 151_936, "bf16", False)]
#: Contestants that have a geometry.
SHAPED = ("two kernels, LSE kept", "one kernel, LSE kept")
COMPILED: list[Shape] = [(1, 5, 151_936, "bf16", False), (1, 5, 32_000, "bf16", False)]
TINY: list[Shape] = [(1, 2, 40, "bf16", False), (2, 2, 40, "fp32", True)]


def items(card: Card) -> list[Item]:
    """Checks, then shapes in order of worth."""
    found = [Item("right before timed", lambda: check(card), 120)]
    found.append(Item("launches and host reads", lambda: launches(card), 60))
    first = card.pick(TARGETS, TINY)
    found += [_item(card, shape) for shape in first[:4]]
    found += [Item(f"geometry, {_key(shape)}", lambda s=shape: geometry(card, s), 120)
              for shape in card.pick(GEOMETRIES_AT, TINY[:1])]  # fmt: skip
    found += [_item(card, shape) for shape in first[4:]]
    found += [_item(card, shape, warm=True) for shape in first[:5]]
    if card.rehearse:
        return found
    found += [_item(card, shape, compiled=True, seconds=150) for shape in COMPILED]
    every = [(*size, False) for size in (*verify.DIAGONAL, *verify.GPU_SIZES)]
    every += [(*size, True) for size in verify.GPU_SIZES if size[0] > 1 and size[1] > 1]
    done = set(first)
    for shape in every:
        if shape not in done:
            done.add(shape)
            found.append(_item(card, shape))
    return found


def _item(
    card: Card, shape: Shape, warm: bool = False, compiled: bool = False, seconds: float = 60
) -> Item:
    key = _key(shape) + " warm" * warm + " compiled" * compiled

    def run() -> dict[str, Any]:
        with torch.inference_mode():
            rows = verify.measure_shape(
                shape, card.bandwidth(), 50, warm=warm, compiled=compiled, device=card.device,
                clock=card.clock,
            )  # fmt: skip
        card.free()
        return {"rows": rows}

    return Item(key, run, seconds)


def _key(shape: Shape) -> str:
    batch, gamma, vocab, dtype, ragged = shape
    return f"B={batch} gamma={gamma} V={vocab} {dtype}" + " ragged" * ragged


def geometry(card: Card, shape: Shape) -> dict[str, Any]:
    """Our kernels with slices and warps other than the usual ones: {geometries, usual, best}."""
    from outrider.ops.triton import launch

    batch, gamma, vocab, dtype, _ = shape
    kind = verify.DTYPES[dtype]
    data = [make(batch, gamma, vocab, kind, 0.2, seed, card.device) for seed in range(2)]
    ours = [one for one in verify.contenders("cuda") if one.name in SHAPED]
    runs: dict[str, tuple[Any, bool]] = {}
    refused: dict[str, str] = {}
    for size, warps in card.pick(GEOMETRIES, [(16, 4)]):
        for one in ours:
            name = f"{one.name}; {size} x {warps}"

            def run(i: int, one: Any = one, shaped: tuple[int, int] = (size, warps)) -> Any:
                launch._forced.append(shaped)
                try:
                    return one.run(data[i])
                finally:
                    launch._forced.pop()

            try:
                run(0)
            except Exception as error:  # a geometry that does not compile is one less
                refused[name] = f"{type(error).__name__}: {str(error)[:200]}"
                continue
            runs[name] = (run, one.graph)
    with torch.inference_mode():
        times = card.clock(runs, len(data), 30)
    best: dict[str, dict[str, Any]] = {}
    for name, told in times.items():
        row, _, shaped = name.partition("; ")
        if "median_us" in told and told["median_us"] < best.get(row, told)["median_us"] + 1e-9:
            best[row] = {"geometry": shaped, "median_us": told["median_us"]}
    usual = launch.block_size(vocab, kind, batch * (gamma + 1))
    card.free()
    return {"geometries": times, "refused": refused, "usual": usual, "best": best}


def check(card: Card) -> dict[str, Any]:
    """Paths, log-sum-exps and laws of every exact contestant; raises SystemExit if one is wrong."""
    if not card.rehearse:
        return verify.check("cuda") | {"absent": contestants.absent()}
    few = [one for one in verify.contenders("cuda") if one.name.startswith("two kernels")]
    return {"contestants": verify.laws_of(few, 8, 20, "cpu"), "absent": contestants.absent()}


def launches(card: Card) -> dict[str, Any]:
    """Kernels that one call launches, their summed time, and how often it reads on the host."""
    batch, gamma, vocab, dtype, _ = card.pick(TARGETS, TINY)[0]
    x = make(batch, gamma, vocab, verify.DTYPES[dtype], 0.2, 0, card.device)
    every = [one for one in verify.contenders("cuda") if not one.compiled]
    if card.rehearse:
        every = [one for one in every if one.name == contestants.BASE]
    with torch.inference_mode():
        return {one.name: launches_of(card, lambda one=one: one.run(x)) for one in every}


def launches_of(card: Card, run: Any) -> dict[str, Any]:
    """Of one call: kernels, their summed microseconds, blocking reads."""
    import warnings

    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        run()
    card.wait()
    activities = [ProfilerActivity.CPU] + ([] if card.rehearse else [ProfilerActivity.CUDA])
    with profile(activities=activities) as seen:
        run()
        card.wait()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    told = {"kernels": len(kernels), "device_us": sum(e.self_device_time_total for e in kernels)}
    if card.rehearse:
        return told
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return told | {"host_reads": sum("synchroniz" in str(w.message) for w in caught)}
