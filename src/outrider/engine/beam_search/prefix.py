"""Texts that share their beginnings: each is a parent and one more token."""

from collections.abc import Iterator, Sequence


class Prefix:
    """A text that is its parent's text and one more token; the same text is the same object.

    >>> root = Prefix(None, 7)
    >>> root.child(5).child(6) is root.child(5).child(6), root.child(5).tokens()
    (True, [7, 5])
    """

    __slots__ = ("children", "length", "parent", "token")

    def __init__(self, parent: "Prefix | None", token: int, length: int = 1) -> None:
        self.parent, self.token, self.length = parent, token, length
        self.children: dict[int, Prefix] = {}

    def child(self, token: int) -> "Prefix":
        """This text and one more token."""
        known = self.children.get(token)
        if known is None:
            known = self.children[token] = Prefix(self, token, self.length + 1)
        return known

    def upwards(self) -> Iterator["Prefix"]:
        """This text, its parent, and so on to the root."""
        node: Prefix | None = self
        while node is not None:
            yield node
            node = node.parent

    def tokens(self) -> list[int]:
        """All tokens, the root's first."""
        return [node.token for node in self.upwards()][::-1]


def chain(prompt: Sequence[int]) -> Prefix:
    """A prompt as one text; its tokens have no other children."""
    node = Prefix(None, prompt[0])
    for token in prompt[1:]:
        node = node.child(token)
    return node
