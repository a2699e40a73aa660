"""Stop strings over split text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.chat.stop import StopStrings
from moonlet.core.errors import ConfigError
from tests.chat import parsing


def scan(stops: list[str], chunks: list[str]) -> tuple[str, str | None]:
    matcher = StopStrings(stops)
    sent = [matcher.push(chunk).text for chunk in chunks]
    return "".join(sent) + matcher.flush(), matcher.matched


def first_end(stops: list[str], text: str) -> tuple[str, str | None]:
    """The rule, spelled out: the shortest prefix that ends with a stop string decides."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    text=st.text("abc", max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
@settings(max_examples=500)
def test_match_follows_the_rule_in_every_split(
    stops: list[str], text: str, cuts: list[int]
) -> None:
    chunks = list(parsing.split_at(text, [min(cut, len(text)) for cut in cuts]))
    assert scan(stops, chunks) == first_end(stops, text)


def test_only_a_possible_beginning_is_held_back() -> None:
    matcher = StopStrings(["STOP", "###"])
    assert matcher.push("go ST") == ("go ", None)
    assert matcher.push("AR #") == ("STAR ", None)
    assert matcher.push("# ") == ("## ", None)
    assert matcher.push("x###y") == ("x", "###")
    assert matcher.push("more") == ("", "###")
    assert matcher.flush() == ""


def test_held_text_is_returned_at_the_end() -> None:
    matcher = StopStrings(["\n\n"])
    assert matcher.push("a\n").text == "a"
    assert matcher.flush() == "\n"
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    assert StopStrings([]).push("abc") == ("abc", None)


def test_very_long_stop_string_costs_linear_time() -> None:
    stop = "a" * 50_000 + "b"
    matcher = StopStrings([stop])
    sent = "".join(matcher.push("a" * 100).text for _ in range(1000))
    assert sent == "a" * 50_000
    assert matcher.push("b").matched == stop


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty"):
        StopStrings(["a", ""])


def test_flush_starts_afresh() -> None:
    matcher = StopStrings(["ab", "xyz"])
    assert matcher.push("1a").text == "1"
    assert matcher.flush() == "a"
    assert matcher.push("b2") == ("b2", None)
    assert matcher.push("ab") == ("", "ab")
