"""What the site needs and the pages, which are read in the repository too, do not say.

The README is the site's first page. Links out of `docs/`, to files of the repository, become the
files' paths, as a site has no such pages.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def within(markdown: str, folder: str) -> str:
    """Links of a page of `folder` as the site's page has them.

    >>> within("[the guide](docs/guide.md#x), [licence](LICENSE)", "")
    '[the guide](guide.md#x), licence (`LICENSE`)'
    >>> within("[card](../src/card.md), [guide](guide.md)", "docs")
    'card (`src/card.md`), [guide](guide.md)'
    >>> within("[guide](../guide.md), [day](2026.md), [card](../../src/card.md)", "docs/results")
    '[guide](../guide.md), [day](2026.md), card (`src/card.md`)'
    """
    inside = folder.removeprefix("docs").removeprefix("/") or "."

    def one(found: re.Match[str]) -> str:
        image, words, path, anchor = found.groups()
        place = posixpath.normpath(posixpath.join(folder, path))
        if place.startswith("docs/"):
            near = posixpath.relpath(place.removeprefix("docs/"), inside)
            return f"{image}[{words}]({near}{anchor or ''})"
        return f"{words} (`{place}`)"

    return LINK.sub(one, markdown)


def on_files(files: Files, config: Any) -> Files:
    """The first page is the README."""
    text = within((ROOT / "README.md").read_text("utf-8"), "")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links out of `docs/` are paths."""
    if page.file.src_uri == "index.md":
        return markdown
    return within(markdown, posixpath.dirname(f"docs/{page.file.src_uri}"))
