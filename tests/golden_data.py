"""Where golden vectors are, and how many of them a run compared.

A test that compares with golden data asks `golden_dir` for the folder of its area, calls `require`
on each file it reads and tells `count_vectors` how many vectors it compared. The full set is
`$MOONLET_GOLDEN` or `../shared/golden` beside the repository; without either the small set in
`tests/golden` is used and vectors that are not in it are skipped with a reason.
"""

import os
from pathlib import Path

import pytest

_TESTS = Path(__file__).resolve().parent
_SUBSET = _TESTS / "golden"
_SIBLING = _TESTS.parent.parent / "shared" / "golden"

_vectors = 0


def golden_root() -> Path:
    """The folder that holds the areas: named, beside the repository, or the committed subset."""
    named = os.environ.get("MOONLET_GOLDEN")
    if named:
        return Path(named)
    return _SIBLING if _SIBLING.is_dir() else _SUBSET


def golden_dir(area: str) -> Path:
    """The folder of one area (`model`, `chat`)."""
    root = golden_root()
    if root == _SIBLING and not (root / area).is_dir():
        return _SUBSET / area
    return root / area


def is_full() -> bool:
    """Whether the full set is in use."""
    return golden_root().resolve() != _SUBSET.resolve()


def is_strict() -> bool:
    """Whether an absent or skipped golden test is a failure."""
    return bool(os.environ.get("MOONLET_GOLDEN")) or os.environ.get("CI") == "true"


def require(path: Path) -> Path:
    """Return `path`; where it is absent, fail in a strict run and skip otherwise."""
    if not path.exists():
        text = f"golden data absent: {path}"
        if is_strict():
            pytest.fail(text, pytrace=False)
        pytest.skip(text)
    return path


def count_vectors(number: int) -> None:
    """Add to the number of golden vectors that this run has compared."""
    global _vectors
    _vectors += number


def counted() -> int:
    """The number of golden vectors compared in this process so far."""
    return _vectors
