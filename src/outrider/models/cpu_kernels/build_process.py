"""Compiles a library of kernels in a process of its own, which leaves none behind.

`python -c TEXT`, where TEXT is this file, reads an order (a line of JSON) from its standard input
and then waits for the end of that input in a thread: when whoever ordered is gone, however it went,
the whole group of processes is killed, compilers with it. The same happens when time is up. Each
source is compiled to an object of its own, kept by what it was made of, so that a build that was
cut off is taken up where it ended and one changed file is compiled alone.

Nothing but the standard library is used: the process starts without packages.
"""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

_DIGEST = 32  #: bytes of a library's digest, behind its own
_REMEMBERED = 24 * 3600.0  #: seconds that a failure is not tried again
_OLD = 14 * 24 * 3600.0  #: seconds after which what no build has used is thrown away


def whole(path: Path) -> bool:
    """Whether a library is there, as `sealed` left it."""
    try:
        made = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(made[:-_DIGEST]).digest() == made[-_DIGEST:]


def sealed(path: Path) -> None:
    """Put a library's digest at its end: what is behind its own is not loaded."""
    with path.open("ab") as file:
        file.write(hashlib.sha256(path.read_bytes()).digest())


def failure(library: Path) -> str | None:
    """Why this library could not be made within the last day; None: nothing is known."""
    try:
        told = json.loads(_failed(library).read_text())
        fresh = 0 <= time.time() - float(told["at"]) < _REMEMBERED
        return str(told["why"]) if fresh else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remember_failure(library: Path, why: str) -> None:
    """Keep why; where that cannot be written it is tried again."""
    with suppress(OSError):
        _failed(library).write_text(json.dumps({"why": why, "at": time.time()}))


def _failed(library: Path) -> Path:
    return library.with_suffix(".failed.json")


def read_with(name: str, texts: dict[str, str]) -> dict[str, str]:
    """A source and the headers that it includes, these by their own includes, too.

    >>> list(read_with("a.c", {"a.c": '#include "b.h"', "b.h": "", "c.h": ""}))
    ['a.c', 'b.h']
    """
    found: dict[str, str] = {}
    left = [name]
    while left:
        one = left.pop()
        if one in texts and one not in found:
            found[one] = texts[one]
            left += re.findall(r'^\s*#\s*include\s+"([^"]+)"', texts[one], re.MULTILINE)
    return found


class Build:
    """One order: a library, of which sources, by which compiler and options."""

    def __init__(self, order: dict[str, object]) -> None:
        given = json.loads(json.dumps(order))
        self.library = Path(given["library"])
        self.sources: list[str] = given["sources"]
        self.texts: dict[str, str] = given["texts"]
        self.ahead: str = given["ahead"]  #: a header that most sources read
        self.compiler: list[str] = given["compiler"]
        self.flags: list[str] = given["flags"]
        self.links: list[str] = given["links"]
        self.at_once: int = given["at_once"]  #: compilers
        self.seconds: float = given["seconds"]
        self.objects = self.library.parent / "objects"

    def share(self) -> float:
        """How many of the sources are compiled, of all."""
        return sum(self._kept(name).exists() for name in self.sources) / len(self.sources)

    def make(self) -> None:
        """Write the library, whole: others may do so at the same time.

        Raises RuntimeError with what the compiler says, and OSError for what cannot be written.
        """
        self.objects.mkdir(parents=True, exist_ok=True)
        with _alone(self.library.parent / "lock") as alone:
            if whole(self.library):
                return
            for left in self.library.parent.glob("*.tmp") if alone else ():  # of builds cut off
                shutil.rmtree(left, ignore_errors=True)
            parent = self.library.parent
            with (
                _limited(self.library, self.seconds),
                TemporaryDirectory(prefix="build.", suffix=".tmp", dir=parent) as folder,
            ):
                self._make(Path(folder))
            self._clear()

    def _make(self, folder: Path) -> None:
        for name, text in self.texts.items():
            Path(folder, name).write_text(text)
        with ThreadPoolExecutor(self.at_once) as pool:
            ahead = self._read_once(folder)
            made = [pool.submit(self._object, name, folder, ahead) for name in self.sources]
            try:
                objects = [str(one.result()) for one in made]
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        scratch = folder / self.library.name
        try:
            self._run([*self.flags, "-shared", *objects, "-o", str(scratch), *self.links], folder)
        except RuntimeError:  # one may be damaged: none is used again
            for one in objects:
                Path(one).unlink(missing_ok=True)
            raise
        sealed(scratch)
        scratch.replace(self.library)

    def _kept(self, name: str) -> Path:
        about = (read_with(name, self.texts), self.compiler, self.flags)
        return self.objects / f"{hashlib.sha256(repr(about).encode()).hexdigest()[:32]}.o"

    def _read_once(self, folder: Path) -> list[str]:
        """Have the compiler keep what it makes of the header `ahead`, and return how it is told to
        use that: to read it for each source anew would be a fourth of a build."""
        missing = [name for name in self.sources if not self._kept(name).exists()]
        if sum(self.ahead in read_with(name, self.texts) for name in missing) < 2:
            return []
        what = ["-x", "c-header", self.ahead, "-o", f"{self.ahead}.gch"]
        try:
            self._run([*self.flags, *what], folder)
        except RuntimeError:  # the first source says why
            return []
        return ["-include", self.ahead]

    def _object(self, name: str, folder: Path, ahead: Sequence[str]) -> Path:
        kept = self._kept(name)
        if kept.exists():
            os.utime(kept)
            return kept
        scratch = folder / f"{name}.o"
        first = ahead if self.ahead in read_with(name, self.texts) else ()
        self._run([*self.flags, *first, "-c", name, "-o", scratch.name], folder)
        scratch.replace(kept)
        return kept

    def _run(self, arguments: list[str], folder: Path) -> None:
        command = [*self.compiler, *arguments]
        done = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        if done.returncode:
            said = done.stderr.strip()[-300:] or f"it ended with code {done.returncode}"
            raise RuntimeError(f"{self.compiler[0]!r} failed: {said}")

    def _clear(self) -> None:
        for path in self.objects.iterdir():
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _OLD:
                    path.unlink()


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """One build at a time in a folder; False where its system has no locks, and several may do the
    same work."""
    import fcntl  # not on every system, and nothing is compiled on those

    with path.open("w") as file:
        locked = False
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # goes with the process
            locked = True
        yield locked


@contextmanager
def _limited(library: Path, seconds: float) -> Iterator[None]:
    """What takes longer ends the process, and is remembered as a failure."""

    def ended() -> None:
        why = f"compiling took longer than {seconds:g} s"
        remember_failure(library, why)
        print(json.dumps({"failed": why}), flush=True)
        _end()

    limit = threading.Timer(seconds, ended)
    limit.daemon = True
    limit.start()
    try:
        yield
    finally:
        limit.cancel()


def _end() -> None:
    """This process, and all that it started."""
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _watch() -> None:
    while os.read(0, 4096):
        pass
    _end()


def main() -> None:
    """Do what standard input orders; say on standard output what went wrong, if anything did."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            return
        line += more
    order = json.loads(line)
    threading.Thread(target=_watch, daemon=True).start()
    build, failed = Build(order), None
    try:
        build.make()
    except RuntimeError as error:
        failed = str(error)
        remember_failure(build.library, failed)
    except OSError as error:
        failed = f"no library could be made in {str(build.library.parent)!r}: {error}"
    print(json.dumps({"failed": failed}), flush=True)
    os._exit(0)  # without waiting for the thread that watches


if __name__ == "__main__":
    main()
