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
COMPILED: list[Shape] = [(1, 5, 151_936, "bf16", False), (1, 5, 32_000, "bf16", False)]
TINY: list[Shape] = [(1, 2, 40, "bf16", False), (2, 2, 40, "fp32", True)]


def items(card: Card) -> list[Item]:
    """Checks, then shapes in order of worth."""
    found = [Item("right before timed", lambda: check(card), 120)]
    found.append(Item("launches and host reads", lambda: launches(card), 60))
    first = card.pick(TARGETS, TINY)
    found += [_item(card, shape) for shape in first]
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
    batch, gamma, vocab, dtype, ragged = shape
    key = f"B={batch} gamma={gamma} V={vocab} {dtype}"
    key += " ragged" * ragged + " warm" * warm + " compiled" * compiled

    def run() -> dict[str, Any]:
        with torch.inference_mode():
            rows = verify.measure_shape(
                shape, card.bandwidth(), 50, warm=warm, compiled=compiled, device=card.device,
                clock=card.clock,
            )  # fmt: skip
        card.free()
        return {"rows": rows}

    return Item(key, run, seconds)


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
