from hypothesis import given
from hypothesis import strategies as st

from tandem.cluster.text.stop_strings import StopStringMatcher

FEW_LETTERS = st.text(alphabet="abc", max_size=30)


def naive(text: str, stops: list[str], include: bool, passed: int = 0) -> tuple[str, str | None]:
    """Character by character: the first place where any stop string has just ended, the longest one there. None ends
    in the first `passed` characters."""
    for end in range(passed + 1, len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            longest = max(ended, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@given(
    st.lists(FEW_LETTERS, max_size=8),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    st.booleans(),
)
def test_equals_the_naive_matcher_in_any_pieces(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopStringMatcher(stops, include)
    output = "".join([matcher.push(piece) for piece in pieces]) + matcher.flush()
    assert (output, matcher.matched) == naive("".join(pieces), stops, include)


@given(
    st.lists(st.text(alphabet="ab", max_size=5), max_size=8),
    st.integers(0, 8),
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_no_stop_ends_in_the_first_pieces_but_it_may_begin_there(
    pieces: list[str], first: int, stops: list[str], include: bool
) -> None:
    matcher = StopStringMatcher(stops, include)
    given_out = [matcher.push(piece, ends=index >= first) for index, piece in enumerate(pieces)]
    passed = len("".join(pieces[:first]))
    assert ("".join(given_out) + matcher.flush(), matcher.matched) == naive("".join(pieces), stops, include, passed)


@given(FEW_LETTERS, st.lists(st.text(alphabet="abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_holds_back_no_more_than_may_begin_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopStringMatcher(stops)
    given_out = matcher.push(text)
    if matcher.matched is None:
        held = text[len(given_out) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_without_stops_text_passes_at_once() -> None:
    matcher = StopStringMatcher(())
    assert matcher.push("anything") == "anything"
    assert matcher.flush() == ""
