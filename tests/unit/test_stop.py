"""Stop strings in text that comes in parts, against a search in the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orca_dist.text import StopMatcher

FEW_LETTERS = st.text(alphabet="abc", max_size=40)  # so that stops overlap and repeat
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=5)
ANY_TEXT = st.text(max_size=30)


def one_shot(text: str, stops: list[str], include_stop: bool) -> tuple[str, bool]:
    """The answer's text and whether a stop ended it: the first end, then the longest stop."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end if include_stop else end - max(map(len, found))], True
    return text, False


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def streamed(chunks: list[str], stops: list[str], include_stop: bool = False) -> list[str]:
    matcher = StopMatcher(stops, include_stop=include_stop)
    return [*(matcher.push(chunk) for chunk in chunks), matcher.flush()]


@given(FEW_LETTERS, STOPS, st.lists(st.integers(0, 1000), max_size=8), st.booleans())
def test_any_chunks_give_what_one_search_gives(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    matcher = StopMatcher(stops, include_stop=include_stop)
    parts = [matcher.push(chunk) for chunk in chunks_of(text, cuts)]
    whole = "".join(parts) + matcher.flush()
    assert (whole, matcher.matched) == one_shot(text, stops, include_stop)


@given(ANY_TEXT, ANY_TEXT, st.text(min_size=1, max_size=6), st.lists(st.integers(0, 99)))
def test_text_of_any_kind(before: str, after: str, stop: str, cuts: list[int]) -> None:
    text = before + stop + after
    parts = streamed(chunks_of(text, cuts), [stop])
    assert "".join(parts) == text[: text.index(stop)]


@given(FEW_LETTERS, STOPS)
def test_only_the_longest_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    sent = ""
    for end, character in enumerate(text, start=1):
        sent += matcher.push(character)
        if matcher.matched:
            return
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
        held = max((b for b in beginnings if text[:end].endswith(b)), key=len, default="")
        assert sent + held == text[:end]


@pytest.mark.parametrize(
    ("chunks", "stops", "sent"),
    [
        (["ab", "cd"], ["bc"], ["a", "", ""]),
        (["abcd"], ["bc"], ["a", ""]),
        (["ab", "xd"], ["bc"], ["a", "bxd", ""]),
        (["ab"], ["bc"], ["a", "b"]),
        (["aab", "aab", "c"], ["aabc"], ["", "aab", "", ""]),
        (["xabc"], ["abc", "c"], ["x", ""]),  # both complete at once: the longest
        (["xabcd"], ["abcd", "b"], ["xa", ""]),  # the first that is complete
        (["a", "b"], [], ["a", "b", ""]),
        (["a", "", "b"], ["ab"], ["", "", "", ""]),
    ],
)
def test_what_is_sent_when(chunks: list[str], stops: list[str], sent: list[str]) -> None:
    assert streamed(chunks, stops) == sent


def test_the_stop_itself_is_added_and_nothing_after_it() -> None:
    assert streamed(["xab", "cd"], ["bc"], include_stop=True) == ["xa", "bc", ""]


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["b"])
    assert [matcher.push("abc"), matcher.push("d"), matcher.flush()] == ["a", "", ""]
