"""Where Python source lies on this machine, and under which licence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

# Free to copy, change and train on with a notice. Anything else is left out, whatever its merits.
PERMISSIVE = frozenset({"MIT", "BSD", "BSD-2-Clause", "BSD-3-Clause", "Apache-2.0", "PSF-2.0"})

_LOOSE_NAMES = {
    "MIT License": "MIT",
    "The MIT License": "MIT",
    "BSD License": "BSD",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache": "Apache-2.0",
    "Apache License": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
    "PSF": "PSF-2.0",
}


#: How the packages of standard libraries are named; no distribution is.
LIBRARY = "cpython-"


@dataclass(frozen=True)
class Source:
    """One file: who ships it, under what licence, and its path inside that package."""

    package: str
    licence: str
    path: str
    file: Path


def standard_libraries(roots: list[Path]) -> Iterator[Source]:
    """Every module of each installation root (`<root>/lib/python3.x`), in the order given."""
    for root in roots:
        libraries = sorted(root.glob("lib/python3.*"))
        if not libraries:
            raise SystemExit(f"no lib/python3.* in {root}; give the roots of Python installations")
        for library in libraries:
            package = LIBRARY + root.name
            for file in sorted(library.rglob("*.py")):
                path = file.relative_to(library).as_posix()
                if not path.startswith("site-packages/"):
                    yield Source(package, "PSF-2.0", path, file)


def installed_packages(folder: Path | None = None) -> Iterator[Source]:
    """Python files of installed distributions whose metadata names only permissive licences."""
    if folder is not None and not folder.is_dir():
        raise SystemExit(f"no folder {folder}; fill it with pip install --target")
    found = distributions(path=[str(folder)]) if folder else distributions()
    for dist in sorted(found, key=lambda d: d.metadata["Name"].lower()):
        licence = permissive_licence(dist)
        if licence is None:
            continue
        for entry in sorted(dist.files or [], key=str):
            file = Path(str(dist.locate_file(entry)))
            if entry.suffix == ".py" and file.is_file():
                package = f"{dist.metadata['Name']}-{dist.version}"
                yield Source(package, licence, entry.as_posix(), file)


def permissive_licence(dist: Distribution) -> str | None:
    """The licence in the metadata if every part of it is permissive, else None.

    The SPDX expression decides where there is one; then the classifiers; then the free field.
    An `OR` would allow a choice, but one licence we cannot name is enough to leave a package out.
    """
    meta = dist.metadata
    expression = meta.get("License-Expression")
    if expression:
        names = [n.strip("() ") for n in re.split(r"\b(?:AND|OR)\b", expression)]
    else:
        classifiers = meta.get_all("Classifier") or []
        # "License :: OSI Approved" alone says nothing; any other licence classifier counts.
        names = [c.split(" :: ")[-1] for c in classifiers if c.startswith("License :: ")]
        names = [n for n in names if n != "OSI Approved"]
        names = names or [(meta.get("License") or "").strip()]
        names = [_LOOSE_NAMES.get(n, n) for n in names]
    return " AND ".join(names) if set(names) <= PERMISSIVE else None
