"""torch's profiler without its talk: it writes to file descriptor 2 from C++, past Python."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

_CHATTER = re.compile(rb"ActivityProfiler|profiler_st(?:art|op)|^STAGE:|Kineto", re.IGNORECASE)


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """What a profiler says on standard error inside is dropped; all other lines are passed on.

    >>> with quiet_profiler():
    ...     _ = os.write(2, b"STAGE:1 ActivityProfilerController.cpp:312] Completed\\n")
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
            said.seek(0)
            for line in said:
                if not _CHATTER.search(line):
                    os.write(2, line)
