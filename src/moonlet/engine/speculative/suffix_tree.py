"""Counts of every run of ids, up to a depth, in a set of texts: a suffix tree built id by id.

A node stands for a run of ids and counts where it occurs. A run that occurs once is not built out:
it is a leaf that points into its text, and becomes a node when a second occurrence arrives. What
is built therefore grows with what repeats, not with the length times the depth.

One text at a time grows (`append`); the places where its endings stand are kept, so that a new id
moves at most ``depth`` of them. Finished texts can be taken out again (`remove`).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

__all__ = ["Draft", "SuffixTree"]


class _Node:
    """A run of ids that occurs at least twice, or did."""

    __slots__ = ("children", "count")

    def __init__(self, count: int) -> None:
        self.count = count
        self.children: dict[int, _Node | _Leaf] = {}


class _Leaf(NamedTuple):
    """A run of ids that occurs once: in ``text``, ending before index ``stop``."""

    text: list[int]
    stop: int


class Draft(NamedTuple):
    """Ids that may follow, and the sum of their estimated probabilities."""

    ids: list[int]
    score: float


NO_DRAFT = Draft([], 0.0)


class SuffixTree:
    """Runs of ids in texts.

    Args:
        depth: Longest run that is counted.
    """

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._root = _Node(0)
        self._text: list[int] = []
        # nodes of the growing text's endings with their lengths, longest first
        self._endings: list[tuple[_Node, int]] = []

    def begin(self) -> list[int]:
        """Start another text, finishing the one that grew, and return its list of ids."""
        self._text, self._endings = [], []
        return self._text

    def append(self, id: int) -> None:
        """Append an id to the growing text."""
        text = self._text
        text.append(id)
        stop, endings = len(text), []
        for node, length in (*self._endings, (self._root, 0)):
            child = node.children.get(id)
            if child is None:
                node.children[id] = _Leaf(text, stop)
                continue
            if isinstance(child, _Leaf):
                child = node.children[id] = self._built_out(child, length + 1)
            child.count += 1
            if length + 1 < self._depth:
                endings.append((child, length + 1))
        self._endings = endings

    def remove(self, text: SequenceOf[int]) -> None:
        """Take out a text that was appended before and grows no longer."""
        for start in range(len(text)):
            node = self._root
            for id in text[start : start + self._depth]:
                child = node.children[id]
                if isinstance(child, _Leaf) or child.count == 1:
                    del node.children[id]
                    break
                child.count -= 1
                node = child

    def follow_growing(self, limit: int, factor: float, least: float) -> Draft:
        """Return the best draft after the text that grows.

        Args:
            limit: Ids at most.
            factor: Ids per id of the matched ending, at most.
            least: The draft ends where the estimated probability of its ids falls below.

        Returns:
            The draft with the largest sum of probabilities over all endings that occurred before;
            of equal ones that of the longest ending.
        """
        return self._best(iter(self._endings), limit, factor, least)

    def follow(self, text: SequenceOf[int], limit: int, factor: float, least: float) -> Draft:
        """Return the best draft after a text that need not be in the tree; see `follow_growing`."""
        return self._best(self._found_endings(text), limit, factor, least)

    def _built_out(self, leaf: _Leaf, length: int) -> _Node:
        """Return the node that takes the place of a leaf at some depth."""
        node = _Node(1)
        if length < self._depth and leaf.stop < len(leaf.text):
            node.children[leaf.text[leaf.stop]] = _Leaf(leaf.text, leaf.stop + 1)
        return node

    def _found_endings(self, text: SequenceOf[int]) -> Iterator[tuple[_Node | _Leaf, int]]:
        for length in range(min(self._depth - 1, len(text)), 0, -1):
            place: _Node | _Leaf = self._root
            for id in text[len(text) - length :]:
                following = _step(place, id)
                if following is None:
                    break
                place = following
            else:
                yield place, length

    def _best(
        self, endings: Iterator[tuple[_Node | _Leaf, int]], limit: int, factor: float, least: float
    ) -> Draft:
        best = NO_DRAFT
        for place, length in endings:
            allowed = min(limit, int(factor * length))
            # shorter endings allow no more, and an id counts at most 1
            if best.score >= allowed:
                break
            draft = _walk(place, min(allowed, self._depth - length), least)
            if draft.score > best.score:
                best = draft
        return best


def _step(place: _Node | _Leaf, id: int) -> _Node | _Leaf | None:
    """Return where a run stands after one more id, None where that never occurred."""
    if isinstance(place, _Node):
        return place.children.get(id)
    text, stop = place
    return _Leaf(text, stop + 1) if stop < len(text) and text[stop] == id else None


def _walk(place: _Node | _Leaf, limit: int, least: float) -> Draft:
    """Take the most frequent id, the lowest of equal ones, again and again."""
    ids: list[int] = []
    probability, score = 1.0, 0.0
    while len(ids) < limit:
        if isinstance(place, _Leaf):
            text, stop = place
            if stop >= len(text):
                break
            id, place = text[stop], _Leaf(text, stop + 1)
        else:
            if not place.children:
                break
            counts = {id: _count(child) for id, child in place.children.items()}
            id = min(counts, key=lambda id: (-counts[id], id))
            probability *= counts[id] / sum(counts.values())
            if probability < least:
                break
            place = place.children[id]
        ids.append(id)
        score += probability
    return Draft(ids, score)


def _count(child: _Node | _Leaf) -> int:
    return 1 if isinstance(child, _Leaf) else child.count
