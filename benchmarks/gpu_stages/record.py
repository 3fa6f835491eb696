"""One stage's result file: written after every item, so that a killed stage loses one item."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STARTED, DONE, FAILED = "started", "done", "failed"
ATTEMPTS = 3  #: after so many interruptions an item has failed: it may be what kills the process


class DamagedFile(Exception):
    """A result file that is not one of this command's: not written over, somebody has to look."""


@dataclass
class Record:
    """Items of a stage by key, each {state, attempts, seconds, result, error}."""

    path: Path
    planned: list[str] = field(default_factory=list)
    rehearsal: bool = False
    entered: list[float] = field(default_factory=list)  #: a command's deadline, and when it came
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> "Record":
        """The file at `path`, or an empty record. Raises DamagedFile."""
        if not path.exists():
            return cls(path)
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            planned, items = list(document["planned"]), dict(document["items"])
            entered, rehearsal = list(document["entered"]), bool(document["rehearsal"])
            return cls(path, planned, rehearsal, entered, items)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFile(
                f"{path} is no result file ({type(error).__name__}: {error}); move it away, and "
                "the stage starts anew"
            ) from error

    def write(self) -> None:
        """Replace the file at once: a reader sees the old one or the new one."""
        document = {
            "stage": self.path.stem,
            "complete": self.complete,
            "planned": self.planned,
            "rehearsal": self.rehearsal,
            "entered": self.entered,
            "items": self.items,
        }
        other = self.path.with_suffix(".part")
        other.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")
        os.replace(other, self.path)

    def state(self, key: str) -> str:
        """started, done, failed, or "" for an item that nobody has tried."""
        return str(self.items.get(key, {}).get("state", ""))

    def attempts(self, key: str) -> int:
        """How often an item was started."""
        return int(self.items.get(key, {}).get("attempts", 0))

    def enter(self, deadline: float, now: float) -> float:
        """When the command with this deadline came to the stage: its bound counts from there,
        whatever number of processes it takes."""
        if not self.entered or self.entered[0] != deadline:
            self.entered = [deadline, now]
        return self.entered[1]

    def plan(self, keys: Sequence[str]) -> list[str]:
        """What is left to do, untried items first: one that was interrupted may be interrupted
        again."""
        self.planned = list(keys)
        for key in keys:
            if self.state(key) == STARTED and self.attempts(key) >= ATTEMPTS:
                self.items[key] |= {"state": FAILED, "error": f"interrupted {ATTEMPTS} times"}
        self.write()
        left = [key for key in keys if self.state(key) not in (DONE, FAILED)]
        return sorted(left, key=self.attempts)

    def start(self, key: str, allowed: float) -> None:
        """Note that an item is being tried, before anything in it can end the process."""
        tries = self.attempts(key) + 1
        self.items[key] = {
            "state": STARTED, "attempts": tries, "at": time.time(), "allowed": allowed,
        }  # fmt: skip
        self.write()

    def interrupted(self, now: float) -> list[str]:
        """The items that a dead process was at; one that had used up its time has failed."""
        found = [key for key in self.items if self.state(key) == STARTED]
        for key in found:
            item = self.items[key]
            if now - item["at"] >= item["allowed"]:
                error = f"took longer than {item['allowed']:g} s; log.txt says where it was"
                item |= {"state": FAILED, "error": error}
        self.write()
        return found

    def forget_failures(self) -> None:
        """Failed items are tried anew."""
        self.items = {k: item for k, item in self.items.items() if item["state"] != FAILED}
        self.write()

    def end(self, key: str, seconds: float, result: dict[str, Any] | None, error: str = "") -> None:
        """Note how it ended."""
        self.items[key] |= {"state": FAILED if error else DONE, "seconds": round(seconds, 3)}
        for name in ("at", "allowed"):
            del self.items[key][name]
        if result is not None:
            self.items[key]["result"] = result
        if error:
            self.items[key]["error"] = error
        self.write()

    @property
    def ended(self) -> bool:
        """Whether nothing is left to try."""
        return bool(self.planned) and all(self.state(k) in (DONE, FAILED) for k in self.planned)

    @property
    def complete(self) -> bool:
        """Whether every planned item has its result."""
        return bool(self.planned) and all(self.state(key) == DONE for key in self.planned)

    @property
    def failures(self) -> dict[str, str]:
        """Key -> error of the items that failed."""
        return {
            key: str(item.get("error", ""))
            for key, item in self.items.items()
            if item["state"] == FAILED
        }

    def results(self) -> dict[str, dict[str, Any]]:
        """Key -> result of every item that left one, failed ones too."""
        return {key: item["result"] for key, item in self.items.items() if "result" in item}
