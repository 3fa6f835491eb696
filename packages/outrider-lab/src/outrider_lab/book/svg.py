"""Pictures as parts of a page: no outside reference, names of their own, no paper behind them."""

import re
import xml.etree.ElementTree as ET

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
#: What a page has no use for, or must not run.
_DROPPED = ("metadata", "script", "foreignObject")
ET.register_namespace("", SVG)
ET.register_namespace("xlink", XLINK)


def inline(text: str, prefix: str, label: str) -> str:
    """An SVG document as an element of a page.

    Its names get a `prefix`, since pictures on one page share theirs; the white of the figure and
    its axes goes, so that it stands on the page's own colour. References to anything outside go.

    >>> print(inline('<svg xmlns="http://www.w3.org/2000/svg"><g id="a"/></svg>', "p-", "dots"))
    <svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="dots"><g id="p-a" /></svg>
    """
    root = ET.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in _DROPPED:
                parent.remove(child)
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            kept = _attribute(name.rpartition("}")[2], value, prefix)
            if kept is None:
                del element.attrib[name]
            else:
                element.set(name, kept)
    _without_paper(root, prefix)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ET.tostring(root, encoding="unicode")


def _attribute(name: str, value: str, prefix: str) -> str | None:
    """A value with names of this page; None if it may not stay."""
    if name.startswith("on"):
        return None
    if name == "id":
        return prefix + value
    if name == "href":
        inside = value.startswith("#")
        return f"#{prefix}{value[1:]}" if inside else value if value.startswith("data:") else None
    if re.search(r"url\((?!#)", value):
        return None
    return re.sub(r"url\(#", f"url(#{prefix}", value)


def _without_paper(root: ET.Element, prefix: str) -> None:
    """matplotlib draws a figure's and an axes' background as white patches, the first of each."""
    for group in root.iter(f"{{{SVG}}}g"):
        name = group.get("id", "")
        if name == f"{prefix}patch_1" or name.startswith(f"{prefix}axes_"):
            path = group.find(f".//{{{SVG}}}path")
            style = "" if path is None else path.get("style", "")
            if path is not None and "fill: #ffffff" in style:
                path.set("style", style.replace("fill: #ffffff", "fill: none"))
