"""`python -m outrider_lab.book.child PARENT WORDS`: a command that ends when its parent does.

A book that is killed must not leave an experiment behind, which would write into the same folder
as the next attempt.
"""

import os
import runpy
import sys
import threading
import time

EVERY_S = 0.5


def watch(parent: int) -> None:
    """End this process when its parent is another one than it was."""
    while os.getppid() == parent:
        time.sleep(EVERY_S)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=watch, args=(int(sys.argv[1]),), daemon=True).start()
    sys.argv = ["outrider", *sys.argv[2:]]
    runpy.run_module("outrider", run_name="__main__", alter_sys=True)
