"""Where an output ends, and what of it stays: EOS, stop strings, the budget, the user's Stop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_level_tokenizer

from specdemo.engines.output import Output
from specdemo.text import TokenText

PIECES = ["a", "b", "c", "ab", "bc", " ", "\n", b"\xf0\x9f", b"\x98\x80", "</s>", "abcabc"]
A, B, C, AB, BC, SPACE, NEWLINE, HALF, OTHER_HALF, END, LONG = range(len(PIECES))
TEXT = TokenText(byte_level_tokenizer(PIECES))
SPECIAL = TokenText(byte_level_tokenizer(["a", "b"], special=["<eos>", "<end of turn>"]))


def make(stop: Sequence[str] = (), eos: Sequence[int] = (), budget: int = 100, text: TokenText = TEXT) -> Output:
    return Output(text, eos, stop, budget)


def test_tokens_add_up_to_the_text() -> None:
    output = make()
    assert output.commit([A, SPACE, HALF]) == ["a", " ", ""]
    assert output.commit([OTHER_HALF, NEWLINE]) == ["😀", "\n"]
    assert (output.ids, output.text) == ([A, SPACE, HALF, OTHER_HALF, NEWLINE], "a 😀\n")
    assert output.finish_reason is None
    assert output.remaining == 95


# EOS


@pytest.mark.parametrize("eos", [0, 1])
def test_pitfall_01_any_of_several_eos_ids_ends_and_what_follows_is_not_taken(eos: int) -> None:
    output = make(eos=[0, 1], text=SPECIAL)
    assert output.commit([2, eos, 3, 3]) == ["a", ""]
    assert output.commit([3]) == []
    assert (output.ids, output.text, output.finish_reason) == ([2, eos], "a", "eos")


def test_pitfall_01_eos_stays_out_of_the_text_even_where_the_tokenizer_calls_it_ordinary() -> None:
    output = make(eos=[END])
    assert output.commit([A, END, B]) == ["a", ""]
    assert (output.ids, output.text, output.finish_reason) == ([A, END], "a", "eos")


def test_a_token_that_is_no_eos_id_of_this_run_goes_on() -> None:
    output = make(text=SPECIAL)
    assert output.commit([2, 0, 3]) == ["a", "", "b"]
    assert output.finish_reason is None


# The budget


def test_pitfall_02_never_one_token_too_many() -> None:
    output = make(budget=3)
    assert output.commit([A, B, C, A, B]) == ["a", "b", "c"]
    assert (output.ids, output.finish_reason, output.remaining) == ([A, B, C], "length", 0)
    assert output.commit([A]) == []


def test_eos_as_the_last_token_of_the_budget_is_eos() -> None:
    output = make(budget=2, eos=[END])
    output.commit([A, END])
    assert output.finish_reason == "eos"


def test_a_stop_string_completed_by_the_last_token_of_the_budget_is_stop() -> None:
    output = make(budget=2, stop=["ab"])
    output.commit([A, B])
    assert (output.text, output.ids, output.finish_reason) == ("", [A], "stop")


# Stop strings


@pytest.mark.parametrize(
    ("commits", "stop", "text", "ids"),
    [
        ([[A, B, C, A]], ["c"], "ab", [A, B, C]),  # a token of its own
        ([[A, LONG, A]], ["bca"], "aa", [A, LONG]),  # inside a token
        ([[A, B, SPACE, A, B]], ["b "], "a", [A, B]),  # over two tokens: the one it begins in stays
        ([[A, B], [C, A]], ["bc"], "a", [A, B]),  # over two rounds: the later token is taken back
        ([[A], [B], [C], [A]], ["abca"], "", [A]),  # over four rounds
        ([[C, A, B, C]], ["bc", "abc"], "c", [C, A]),  # of two that are complete, the one that begins first
        ([[C, A, B, C]], ["c", "abc"], "", [C]),  # of two, the one that is complete first
        ([[AB, BC]], ["bb"], "a", [AB]),  # from the middle of a token to the middle of the next
        ([[A, HALF, OTHER_HALF, B]], ["😀"], "a", [A, HALF, OTHER_HALF]),  # a character of two tokens
        ([[A, NEWLINE], [NEWLINE, B]], ["\n\n"], "a", [A, NEWLINE]),
    ],
)
def test_pitfall_03_text_and_ids_are_cut_together(
    commits: list[list[int]], stop: list[str], text: str, ids: list[int]
) -> None:
    output = make(stop=stop)
    for tokens in commits:
        output.commit(tokens)
    assert (output.text, output.ids, output.finish_reason) == (text, ids, "stop")
    assert output.commit([A]) == []


def test_pitfall_03_what_only_looks_like_a_stop_string_goes_on() -> None:
    output = make(stop=["abb", "cc"])
    output.commit([A, B, A, B, C, A, B])
    assert output.finish_reason is None
    output.commit([B])
    assert (output.text, output.ids, output.finish_reason) == ("ababc", [A, B, A, B, C, A], "stop")


def test_a_stop_string_made_by_the_last_flush_is_found() -> None:
    output = make(stop=["\ufffd"], budget=2)
    output.commit([A, HALF])
    assert (output.text, output.finish_reason) == ("a", "stop")


@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=12),
    st.lists(st.sampled_from(["ab", "bc", "c", "ca", " ", "\n\n", "😀", "cab", "abcabca"]), max_size=2),
    st.lists(st.integers(1, 4), min_size=12, max_size=12),
    st.integers(1, 12),
)
@settings(max_examples=100, deadline=None)
def test_pitfall_03_rounds_of_any_size_end_alike(
    tokens: list[int], stop: list[str], sizes: list[int], budget: int
) -> None:
    """Token by token, as standard decoding commits, or in rounds: the same ids, text and reason; and the text is what
    is left of the whole when it is cut at the first stop string that was complete."""
    one_by_one, in_rounds = (make(stop=stop, eos=[END], budget=budget) for _ in range(2))
    for id in tokens:
        one_by_one.commit([id])
    rest = list(tokens)
    for size in sizes:
        in_rounds.commit(rest[:size])
        rest = rest[size:]
    assert (in_rounds.ids, in_rounds.text) == (one_by_one.ids, one_by_one.text)
    assert in_rounds.finish_reason == one_by_one.finish_reason
    assert not any(text in in_rounds.text for text in stop)
    assert tokens[: len(in_rounds.ids)] == in_rounds.ids
    if in_rounds.finish_reason == "stop":
        whole = TEXT.tokenizer.decode(tokens)
        assert whole.startswith(in_rounds.text)
        assert any(whole.startswith(text, len(in_rounds.text)) for text in stop)
        before_the_last = "".join(make().commit(in_rounds.ids[:-1]))
        assert len(before_the_last) <= len(in_rounds.text)  # the last id kept is the one in which the stop begins


# What is held back


@pytest.mark.parametrize("end", ["length", "eos", "cancelled"])
def test_pitfall_22_half_a_character_at_the_end_is_in_the_text_and_in_what_the_last_token_added(end: str) -> None:
    output = make(eos=[END], budget=2 if end == "length" else 10)
    texts = output.commit([A, HALF, END] if end == "eos" else [A, HALF])
    if end == "cancelled":
        texts[-1] += output.cancel()
    assert output.finish_reason == end
    assert "".join(texts) == output.text == "a\ufffd"


def test_cancel_keeps_what_was_committed_and_the_first_reason() -> None:
    output = make()
    output.commit([A, B])
    assert output.cancel() == ""
    assert (output.ids, output.text, output.finish_reason) == ([A, B], "ab", "cancelled")
    assert output.commit([C]) == []
    ended = make(budget=1)
    ended.commit([A])
    ended.cancel()
    assert ended.finish_reason == "length"


# Drafts that are not committed


def test_a_drafts_text_continues_the_output_and_leaves_it_alone() -> None:
    output = make()
    output.commit([A, HALF])
    assert output.draft_texts([OTHER_HALF, B]) == ["😀", "b"]
    assert output.draft_texts([B, HALF]) == ["\ufffdb", "\ufffd"]
    assert output.draft_texts([]) == []
    assert (output.ids, output.text) == ([A, HALF], "a")
    assert output.commit([OTHER_HALF]) == ["😀"]
