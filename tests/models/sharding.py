"""Texts of a sharded target: requests come and go on rank 0, and it tells what became of them.

    torchrun --nproc-per-node 2 tests/models/sharding.py '{"load": {...}, "prompts": [...], ...}'

Tests call `decoded` in one process, `forked` in processes made of this one, and `started` under
torchrun.
"""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import traceback


def decoded(asked):
    """Token ids of every request by `asked["load"]`, coupled; one may be cancelled on the way.

    prompts   token ids, or texts for the tokenizer
    cancel    {number: the step ahead of which it is cancelled}
    die       {rank: tokens}: that rank kills itself (used by tests of failures)
    """
    from outrider import SamplingParams, StopConditions, load
    from outrider.engine.engine_run import EngineRun
    from outrider.engine.request import Request

    speculator = load(threads=1, shared_noise=True, **asked["load"])
    run = EngineRun(
        speculator.engine,
        max_num_seqs=asked.get("max_num_seqs", 4),
        capacity=asked.get("capacity", 128),
    )
    for number, prompt in enumerate(asked["prompts"]):
        ids = speculator.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        sampling = SamplingParams(asked.get("temperature", 0.8), seed=number)
        run.submit(Request(ids, sampling, StopConditions(asked.get("tokens", 16))))
    texts = [[] for _ in asked["prompts"]]
    cancel, steps = {int(n): step for n, step in asked.get("cancel", {}).items()}, 0
    while not run.done:
        for number in [n for n, step in cancel.items() if step == steps]:
            run.end(number)
        for block in run.step():
            texts[block.request_id] += block.token_ids
        steps += 1
        if "go" in asked and steps == 2:
            with open(asked["go"], "w"):
                pass
    phases = [phase.name for phase in run.phases]
    drafted = run.stats.accepted
    close = getattr(speculator.engine.target, "close", None)
    if close is not None:  # processes of multiprocessing do not run what waits for their end
        close()
    return {"texts": texts, "phases": phases, "steps": steps, "accepted": drafted}


def free_port():
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return some.getsockname()[1]


def environment(rank, size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def forked(asked, size=2, before=None):
    """What rank 0 tells, and the exit codes of all; `before(rank)` is called in each."""
    context = multiprocessing.get_context("fork")
    told, tells = context.Pipe(duplex=False)
    port = free_port()
    ranks = [
        context.Process(target=_rank, args=(asked, rank, size, port, tells, before))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    tells.close()
    try:
        answer = told.recv()
    except EOFError:
        answer = None
    for rank in ranks:
        rank.join(60)
    return answer, [rank.exitcode for rank in ranks]


def _rank(asked, rank, size, port, tells, before):
    os.environ.update(environment(rank, size, port))
    if before is not None:
        before(rank)
    try:
        tells.send(decoded(asked))
    except Exception as error:
        if rank == 0:
            tells.send({"error": f"{type(error).__name__}: {error}"})
        else:
            traceback.print_exc()
        sys.exit(1)


def started(asked, size=2, seconds=170):
    """The same under torchrun."""
    torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    torchrun += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    done = subprocess.run(
        [sys.executable, *torchrun, __file__, json.dumps(asked)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def alone(asked, size=2):
    """Processes without torchrun, which would end one when another dies: (process, rank) each."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, __file__, json.dumps(asked)],
            env={**os.environ, **environment(rank, size, port)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def wait_for(path, seconds):
    """Until a file is there."""
    end = time.monotonic() + seconds
    while not os.path.exists(path):
        assert time.monotonic() < end, f"no {path} in {seconds} seconds"
        time.sleep(0.05)


if __name__ == "__main__":
    print(json.dumps(decoded(json.loads(sys.argv[1]))), flush=True)
