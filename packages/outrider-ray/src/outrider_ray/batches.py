"""Files of requests on Ray Data: every worker has a model and a loop of its own."""

import json
import os
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from outrider.errors import BackendUnavailable
from outrider.server import batch_file
from outrider.server.batch_file import BatchLine, Row
from outrider.server.messages import JsonObject
from outrider.text.speculator import Speculator

_BLOCK = 2  #: requests that a worker takes at a time, for each of its rows


class Worker:
    """A model in a process of its own."""

    def __init__(self, load: Callable[[], Speculator], name: str, rows: int, capacity: int) -> None:
        self._speculator = load()
        self._how = name, rows, capacity

    def __call__(self, batch: JsonObject) -> JsonObject:
        """Rows for lines."""
        wanted = [BatchLine(*json.loads(one)) for one in batch["wanted"]]
        rows = batch_file.answers(self._speculator, *self._how, wanted)
        return {"row": np.array([json.dumps(row) for row in rows], dtype=object)}


def answers(
    load: Callable[[], Speculator],
    name: str,
    rows: int,
    capacity: int,
    wanted: Iterable[BatchLine],
    workers: int,
) -> Iterator[Row]:
    """As `batch_file.answers`, by `workers` processes of the cluster that RAY_ADDRESS names.

    Without one a cluster of this machine alone is started. Lines whose worker dies are answered by
    another: a row may come twice, and is the same then, but for lines without a seed.
    """
    if "RAY_ADDRESS" not in os.environ:  # Ray's own name for it: listen on loopback alone
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise BackendUnavailable(
            f"--ray needs Ray ({error.name} is missing); pip install 'ray[serve,data]', or leave "
            "--ray out"
        ) from None
    # without an address Ray joins the cluster that temporary files name, which may have ended
    where = os.environ.get("RAY_ADDRESS", "local")
    ray.init(where, log_to_driver=False, ignore_reinit_error=True)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    lines = [{"wanted": json.dumps(one)} for one in wanted]
    size = _BLOCK * rows
    done = ray.data.from_items(lines, override_num_blocks=-(-len(lines) // size)).map_batches(
        Worker,
        fn_constructor_args=(load, name, rows, capacity),
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=1,
    )
    for row in done.iter_rows():
        yield json.loads(row["row"])
