"""The two loops, watched by models that assert how they are used: rounds, caches, endings, events."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import (
    Call,
    TableLM,
    byte_level_tokenizer,
    chain,
    decode,
    drafter_factory,
    emitted,
    letters,
    make_job,
    outcome,
    random_table,
    rounds,
    shown_ids,
    shown_text,
    timeless,
)
from torch import Tensor

from specdemo import clock
from specdemo.drafters.base import Drafter, Proposal
from specdemo.drafters.draft_model import LEAST_CONFIDENCE
from specdemo.engines import report
from specdemo.engines.draft_length import PROBE_EVERY, AdaptiveDraftLength, FixedDraftLength
from specdemo.engines.job import Job
from specdemo.engines.report import explain
from specdemo.engines.speculative import speculative
from specdemo.engines.standard import standard
from specdemo.errors import BadRequest
from specdemo.events import Event, Prefilled, Started, Verified
from specdemo.metrics import fold
from specdemo.sampling import Purpose, draw, uniform
from specdemo.settings import Settings
from specdemo.text import TokenText

V = 12
LETTERS = letters(V)
FIVE_LETTERS = letters(5)
METHODS = ["standard", "speculative", "prompt-lookup", "hybrid", "ssd"]
WITH_DRAFT_MODEL = ("speculative", "hybrid", "ssd")
each_method = pytest.mark.parametrize("method", METHODS)

COUNTING = chain({}, V)  # 0 1 2 3 4 5 6 7 8 9 10 11 0 1 ...


def extends(lm: TableLM) -> list[Call]:
    return [call for call in lm.calls if call.kind == "extend"]


def fates(verified: Verified) -> list[str]:
    return [token.fate for token in verified.judged]


# Cache discipline, call by call


def test_standard_feeds_the_prompt_once_and_then_one_token_a_round() -> None:
    target = TableLM(COUNTING)
    events = decode(make_job(target, [0, 1, 2], Settings(max_new_tokens=4), LETTERS))
    assert outcome(events).token_ids == (3, 4, 5, 6)
    assert extends(target) == [Call("extend", cached, count, 1) for cached, count in [(0, 3), (3, 1), (4, 1), (5, 1)]]
    assert [cache.closed for cache in target.opened] == [1]


def test_an_accepted_draft_is_caught_up_in_the_next_forward_and_never_fed_twice() -> None:
    """K = 3 and draft = target: each round 3 accepted and a bonus. The draft model has not seen its own last token."""
    target, draft = TableLM(COUNTING), TableLM(COUNTING)
    events = decode(make_job(target, [0, 1], Settings(max_new_tokens=9, draft_length=3), LETTERS), "speculative", draft)
    assert [fates(verified) for _, verified in rounds(events)] == [["accepted"] * 3] * 2
    # the prompt; then what is committed and not cached (1 token) and the draft
    assert extends(target) == [Call("extend", 0, 2, 1), Call("extend", 2, 4, 4), Call("extend", 6, 4, 4)]
    assert extends(draft) == [
        Call("extend", 0, 2, 1),
        *[Call("extend", cached, 1, 1) for cached in (2, 3, 4)],
        Call("extend", 5, 2, 1),  # its last token of the round before, and the bonus
        *[Call("extend", cached, 1, 1) for cached in (7, 8)],
    ]


def test_a_refused_draft_is_rolled_back_and_not_recomputed() -> None:
    """The draft model goes wrong after 3: one accepted, one rejected, one discarded."""
    target, draft = TableLM(COUNTING), TableLM(chain({3: 9}, V))
    events = decode(make_job(target, [0, 1], Settings(max_new_tokens=5, draft_length=3), LETTERS), "speculative", draft)
    (_, first), (_, second) = rounds(events)
    assert fates(first) == ["accepted", "rejected", "discarded"]
    assert fates(second) == ["accepted"]
    # sequence 0 1 | 2 | 3 4 | 5 6
    assert target.calls == [
        Call("extend", 0, 2, 1),
        Call("truncate", 2, 2),
        Call("extend", 2, 4, 4),
        Call("truncate", 6, 4),
        Call("extend", 4, 2, 2),
        Call("truncate", 6, 6),
    ]
    assert draft.calls[-3:] == [Call("truncate", 5, 4), Call("extend", 4, 1, 1), Call("truncate", 5, 6)]


def test_k_0_feeds_the_target_exactly_as_standard_decoding_does() -> None:
    plain, target, draft = TableLM(COUNTING), TableLM(COUNTING), TableLM(COUNTING)
    settings = Settings(max_new_tokens=6, draft_length=0)
    decode(make_job(plain, [0, 1], settings, LETTERS))
    decode(make_job(target, [0, 1], settings, LETTERS), "speculative", draft)
    assert extends(target) == extends(plain)
    assert extends(draft) == [Call("extend", 0, 2, 1)]


class WatchedDrafter:
    """Proposes what its `plan` says for each round and checks what it is shown."""

    model = None
    cost_ratio = 0.1

    def __init__(self, job: Job, plan: Sequence[Sequence[int]]) -> None:
        self.target = job.target
        self.plan = [list(ids) for ids in plan]
        self.asked: list[int] = []
        self.closed = 0
        self.prefilled = 0
        self.seen: list[int] = []

    def prefill(self, tokens: Sequence[int]) -> None:
        assert not self.asked
        self.prefilled += 1
        self.seen = list(tokens)

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        assert list(tokens) == self.seen
        cache = self.target.opened[-1]
        assert cache.cached <= max(0, len(tokens) - 1)
        self.asked.append(draft_length)
        round_index = len(self.asked) - 1
        ids = self.plan[round_index - 1] if round_index and round_index <= len(self.plan) else []
        return Proposal(torch.tensor(ids[:draft_length], dtype=torch.long), None, origin="plan")

    def observe(self, tokens: Sequence[int]) -> None:
        cache = self.target.opened[-1]
        assert cache.cached <= len(tokens) - 1
        assert cache.ids == list(tokens)[: cache.cached]
        self.seen = list(tokens)

    def close(self) -> None:
        self.closed += 1


def watched(
    target: TableLM, settings: Settings, plan: Sequence[Sequence[int]], **more: Any
) -> tuple[list[Event], WatchedDrafter]:
    made: list[WatchedDrafter] = []

    def make(job: Job) -> Drafter:
        made.append(WatchedDrafter(job, plan))
        return made[-1]

    text = more.pop("text", LETTERS)
    events = list(speculative(make_job(target, [0, 1], settings, text, **more), make))
    (drafter,) = made
    assert (drafter.closed, drafter.prefilled) == (1, 1)
    return events, drafter


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ([3, 4, 5], (["accepted"] * 3, 6, "bonus")),
        ([9, 4, 5], (["rejected", "discarded", "discarded"], 3, "recovered")),
        ([3, 9, 5], (["accepted", "rejected", "discarded"], 4, "recovered")),
        ([3, 4, 9], (["accepted", "accepted", "rejected"], 5, "recovered")),
        ([], ([], 3, "bonus")),
    ],
    ids=["all", "first", "middle", "last", "no draft"],
)
def test_pitfall_08_nothing_stays_behind_the_first_mismatch_and_one_token_follows(
    plan: list[int], expected: tuple[list[str], int, str]
) -> None:
    events, _ = watched(TableLM(COUNTING), Settings(max_new_tokens=8, draft_length=3), [plan])
    drafted, verified = rounds(events)[0]
    assert verified.extra is not None
    assert (fates(verified), verified.extra.id, verified.extra_kind) == expected
    assert [token.id for token in drafted.tokens] == [token.id for token in verified.judged] == plan
    assert verified.num_accepted == fates(verified).count("accepted")
    assert outcome(events).token_ids == (2, 3, 4, 5, 6, 7, 8, 9)


# Endings


@pytest.mark.parametrize("eos", [{4}, {4, 9}, {9, 4, 11}])
def test_pitfall_01_eos_mid_draft_ends_everything_there(eos: set[int]) -> None:
    events, drafter = watched(
        TableLM(COUNTING), Settings(max_new_tokens=20, draft_length=5), [[3, 4, 5, 6, 7]], eos_ids=frozenset(eos)
    )
    ((drafted, verified),) = rounds(events)
    assert fates(verified) == ["accepted", "accepted", "clipped", "clipped", "clipped"]
    assert (verified.num_accepted, verified.extra, verified.extra_kind) == (2, None, None)
    assert [token.text for token in drafted.tokens] == ["d", "", "f", "g", "h"]
    finished = outcome(events)
    assert (finished.finish_reason, finished.token_ids, finished.text) == ("eos", (2, 3, 4), "cd")
    metrics = fold(events)
    assert (metrics.tokens, metrics.drafted, metrics.accepted, metrics.accepted_histogram) == (3, 2, 2, (0, 0, 1))
    assert drafter.seen == [0, 1, 2, 3, 4]


def test_pitfall_01_eos_as_the_last_accepted_token_earns_no_bonus() -> None:
    target = TableLM(COUNTING)
    events, _ = watched(target, Settings(draft_length=2), [[3, 4]], eos_ids=frozenset({4}))
    ((_, verified),) = rounds(events)
    assert (fates(verified), verified.extra) == (["accepted", "accepted"], None)
    assert outcome(events).token_ids == (2, 3, 4)


def test_pitfall_01_eos_before_a_rejected_token_leaves_nothing_rejected() -> None:
    events, _ = watched(TableLM(COUNTING), Settings(draft_length=3), [[3, 4, 9]], eos_ids=frozenset({4}))
    ((_, verified),) = rounds(events)
    assert fates(verified) == ["accepted", "accepted", "clipped"]
    assert fold(events).alpha == 1.0


def test_a_drafted_eos_that_the_target_refuses_ends_nothing() -> None:
    events, _ = watched(
        TableLM(COUNTING), Settings(max_new_tokens=4, draft_length=2), [[11, 3]], eos_ids=frozenset({11})
    )
    assert outcome(events).token_ids == (2, 3, 4, 5)
    assert outcome(events).finish_reason == "length"


@each_method
@pytest.mark.parametrize("eos", [2, 3, 4])
def test_eos_at_the_prefill_as_recovered_and_as_bonus(method: str, eos: int) -> None:
    target, draft = TableLM(COUNTING), TableLM(chain({2: 9}, V))
    settings = Settings(max_new_tokens=9, draft_length=1)
    events = decode(make_job(target, [0, 1], settings, LETTERS, eos_ids=frozenset({eos})), method, draft)
    assert outcome(events).token_ids == tuple(range(2, eos + 1))
    assert outcome(events).finish_reason == "eos"
    assert fold(events).tokens == eos - 1


def test_eos_can_be_ignored() -> None:
    settings = Settings(max_new_tokens=5, ignore_eos=True)
    events = decode(make_job(TableLM(COUNTING), [0, 1], settings, LETTERS, eos_ids=frozenset({3})))
    assert outcome(events).token_ids == (2, 3, 4, 5, 6)
    assert outcome(events).text == "cdefg"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("method", ["speculative", "hybrid", "prompt-lookup"])
def test_pitfall_02_a_draft_never_reaches_past_the_room_left(method: str, max_new_tokens: int) -> None:
    prompt = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1]
    target, draft = TableLM(COUNTING), TableLM(COUNTING)
    settings = Settings(max_new_tokens=max_new_tokens, draft_length=3)
    events = decode(make_job(target, prompt, settings, LETTERS), method, draft)
    done = 1
    for drafted, verified in rounds(events):
        assert len(drafted.tokens) == min(3, max_new_tokens - done - 1)
        done += emitted(verified)
    assert done == max_new_tokens == len(outcome(events).token_ids)
    assert outcome(events).finish_reason == "length"
    fed = sum(call.count for call in extends(target)) - len(prompt)
    assert fed == max_new_tokens - 1  # the last token is never fed


@each_method
def test_pitfall_02_prompt_and_output_fill_the_context_and_not_more(method: str) -> None:
    target, draft = TableLM(COUNTING, context=8), TableLM(COUNTING, context=8)
    settings = Settings(max_new_tokens=50, draft_length=5)
    events = decode(make_job(target, [0, 1, 2, 3, 4], settings, LETTERS), method, draft)
    assert outcome(events).token_ids == (5, 6, 7)
    assert outcome(events).finish_reason == "length"


@pytest.mark.parametrize("method", ["speculative", "hybrid"])
@pytest.mark.parametrize("context", [2, 4, 5, 6, 9])
def test_pitfall_02_a_draft_model_with_a_shorter_context_stops_drafting_at_its_end(method: str, context: int) -> None:
    """The output goes on without it, and its cache is never fed past its context."""
    target, draft = TableLM(COUNTING), TableLM(COUNTING, context=context)
    settings = Settings(max_new_tokens=9, draft_length=3)
    events = decode(make_job(target, [0, 1, 2, 3], settings, LETTERS), method, draft)
    assert outcome(events).token_ids == (4, 5, 6, 7, 8, 9, 10, 11, 0)
    drafted = [len(event.tokens) for event, _ in rounds(events) if event.origin == "model"]
    assert bool(drafted) == (context > 5)
    assert max((cache.cached for cache in draft.opened), default=0) <= context


def test_pitfall_03_a_stop_string_early_in_a_long_accepted_run_cuts_everything() -> None:
    events, _ = watched(TableLM(COUNTING), Settings(draft_length=6, stop=("e",)), [[3, 4, 5, 6, 7, 8]])
    ((_, verified),) = rounds(events)
    assert fates(verified) == ["accepted", "accepted", *["clipped"] * 4]
    assert (verified.num_accepted, verified.extra) == (2, None)
    finished = outcome(events)
    assert (finished.finish_reason, finished.token_ids, finished.text) == ("stop", (2, 3, 4), "cd")
    metrics = fold(events)
    assert (metrics.tokens, metrics.accepted, metrics.drafted) == (3, 2, 2)


def test_pitfall_03_a_stop_string_over_two_tokens_of_a_draft() -> None:
    events, _ = watched(TableLM(COUNTING), Settings(draft_length=6, stop=("efg",)), [[3, 4, 5, 6, 7, 8]])
    ((_, verified),) = rounds(events)
    assert fates(verified) == ["accepted", "accepted", *["clipped"] * 4]
    assert (outcome(events).token_ids, outcome(events).text) == ((2, 3, 4), "cd")


def test_pitfall_03_a_stop_string_over_three_rounds_takes_back_what_was_shown() -> None:
    """Rounds: c | d e | f g | h i. The stop string is e to h."""
    events, drafter = watched(TableLM(COUNTING), Settings(draft_length=1, stop=("efgh",)), [[3], [5], [7]])
    assert [fates(verified) for _, verified in rounds(events)] == [["accepted"], ["accepted"], ["clipped"]]
    last = rounds(events)[-1][1]
    assert (last.num_accepted, last.extra) == (0, None)
    finished = outcome(events)
    assert (finished.finish_reason, finished.token_ids, finished.text) == ("stop", (2, 3, 4), "cd")
    metrics = fold(events)
    assert (metrics.tokens, metrics.accepted, metrics.rounds) == (3, 1, 3)
    assert drafter.seen == [0, 1, 2, 3, 4]


def test_pitfall_03_a_stop_string_begun_in_the_prefill_leaves_its_one_token() -> None:
    events, _ = watched(TableLM(COUNTING), Settings(draft_length=3, stop=("cde",)), [[3, 4, 5]])
    assert (outcome(events).token_ids, outcome(events).text) == ((2,), "")
    assert fold(events).tokens == 1


@each_method
def test_the_user_can_stop_after_any_round(method: str) -> None:
    for after in (1, 2, 3):
        asked = 0

        def should_stop(after: int = after) -> bool:
            nonlocal asked
            asked += 1
            return asked == after

        target, draft = TableLM(COUNTING), TableLM(COUNTING)
        settings = Settings(max_new_tokens=40, draft_length=2)
        events = decode(make_job(target, [0, 1], settings, LETTERS, should_stop=should_stop), method, draft)
        assert asked == after
        assert len(rounds(events)) == after - 1
        assert outcome(events).finish_reason == "cancelled"
        assert list(outcome(events).token_ids) == shown_ids(events)
        assert outcome(events).text == shown_text(events)


def test_half_a_character_at_the_end_is_in_the_events_too() -> None:
    text = TokenText(byte_level_tokenizer([f"{i}" for i in range(10)] + [b"\xf0\x9f", b"\x98\x80"]))
    for options in ({"max_new_tokens": 3}, {"max_new_tokens": 9}):
        asked = iter([False, False, True])
        job = make_job(
            TableLM(COUNTING), [6, 7], Settings(**options), text, should_stop=lambda asked=asked: next(asked)
        )
        events = decode(job)
        assert outcome(events).text == shown_text(events) == "89\ufffd"


# Release


@each_method
def test_pitfall_25_a_closed_generator_releases_the_caches_exactly_once_wherever_it_stood(method: str) -> None:
    settings = Settings(max_new_tokens=6, draft_length=2)
    length = len(decode(make_job(TableLM(COUNTING), [0, 1], settings, LETTERS), method, TableLM(COUNTING)))
    for after in range(length + 1):
        target, draft = TableLM(COUNTING), TableLM(COUNTING)
        job = make_job(target, [0, 1], settings, LETTERS)
        events = standard(job) if method == "standard" else speculative(job, drafter_factory(method, draft))
        for _ in range(after):
            next(events)
        events.close()
        caches = [*target.opened, *draft.opened]
        assert len(caches) == (0 if after == 0 else 2 if method in WITH_DRAFT_MODEL else 1)
        assert all(cache.closed == 1 for cache in caches)


@each_method
def test_pitfall_26_a_failing_model_passes_its_error_on_and_leaves_nothing_open(method: str) -> None:
    settings = Settings(max_new_tokens=6, draft_length=2)
    for failing in ("target", "draft") if method in WITH_DRAFT_MODEL else ("target",):
        for forward in range(3):
            target, draft = TableLM(COUNTING), TableLM(COUNTING)
            (target if failing == "target" else draft).fail_at = forward
            job = make_job(target, [0, 1], settings, LETTERS)
            with pytest.raises(RuntimeError, match="the model broke"):
                decode(job, method, draft)
            assert all(cache.closed == 1 for cache in [*target.opened, *draft.opened])
            target.fail_at = draft.fail_at = None
            assert outcome(decode(job, method, draft)).token_ids == (2, 3, 4, 5, 6, 7)


def test_a_drafter_that_cannot_be_made_leaves_no_cache_open() -> None:
    target = TableLM(COUNTING)

    def make(job: Job) -> Drafter:
        raise RuntimeError("no drafter")

    with pytest.raises(RuntimeError, match="no drafter"):
        list(speculative(make_job(target, [0, 1], Settings(), LETTERS), make))
    assert [cache.closed for cache in target.opened] == [1]


# Requests


def test_pitfall_15_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(BadRequest, match="no tokens"):
        make_job(TableLM(COUNTING), [], Settings(), LETTERS)


@pytest.mark.parametrize("length", [8, 9, 100])
def test_pitfall_15_a_prompt_that_fills_the_context_is_refused_with_the_limit(length: int) -> None:
    with pytest.raises(BadRequest, match=f"has {length} tokens and the context of table holds 8"):
        make_job(TableLM(COUNTING, context=8), [0] * length, Settings(), LETTERS)


# Events


@each_method
def test_events_are_plain_values_that_pickle(method: str) -> None:
    settings = Settings(max_new_tokens=6, draft_length=2, temperature=1.0, stop=("zz",))
    job = make_job(TableLM(COUNTING), [0, 1], settings, LETTERS, lane="left", method=method, notes=("a note",))
    events = decode(job, method, TableLM(COUNTING, name="small"))
    assert pickle.loads(pickle.dumps(events)) == events
    started = events[0]
    assert isinstance(started, Started)
    assert (started.lane, started.method, started.target, started.notes) == ("left", method, "table", ("a note",))
    assert started.draft == ("small" if method in WITH_DRAFT_MODEL else None)
    assert started.settings["stop"] == ["zz"]
    assert {event.lane for event in events} == {"left"}


def test_what_is_explained_is_the_softmax_before_temperature_and_filters() -> None:
    table, small = random_table(1, V), random_table(2, V)
    settings = Settings(max_new_tokens=8, draft_length=3, temperature=0.5, top_k=3, repetition_penalty=1.3)
    events = decode(make_job(TableLM(table), [0, 1], settings, LETTERS), "speculative", TableLM(small))
    ids = [0, 1]

    def raw(table: Tensor, tokens: list[int]) -> Tensor:
        return table[tokens[-2], tokens[-1]].softmax(-1)

    prefilled = events[1]
    assert isinstance(prefilled, Prefilled)
    assert prefilled.token.raw_p == pytest.approx(float(raw(table, ids)[prefilled.token.id]))
    ids.append(prefilled.token.id)
    seen = 0
    for drafted, verified in rounds(events):
        tokens = list(ids)
        for guess, judged in zip(drafted.tokens, verified.judged, strict=True):
            p, q = raw(table, tokens), raw(small, tokens)
            assert judged.raw_p == pytest.approx(float(p[judged.id]))
            assert guess.raw_q == pytest.approx(float(q[guess.id]))
            for top, row in ((judged.top, p), (guess.top, q)):
                best = row.topk(5)
                assert [candidate.id for candidate in top] == best.indices.tolist()
                assert [candidate.prob for candidate in top] == pytest.approx(best.values.tolist())
                assert [candidate.text for candidate in top] == [LETTERS.piece(candidate.id) for candidate in top]
            tokens.append(judged.id)
            seen += 1
        assert verified.extra is not None
        after = ids + [token.id for token in verified.judged][: verified.num_accepted]
        assert verified.extra.raw_p == pytest.approx(float(raw(table, after)[verified.extra.id]))
        ids = [*after, verified.extra.id]
    assert seen >= 6


def test_the_explanation_changes_nothing_but_itself() -> None:
    settings = Settings(max_new_tokens=8, draft_length=3, temperature=1.0)

    def lane(explain: bool) -> list[Event]:
        target, draft = TableLM(random_table(1, V)), TableLM(random_table(2, V))
        return decode(make_job(target, [0, 1], settings, LETTERS, explain=explain), "speculative", draft)

    with_it, without = lane(True), lane(False)
    assert outcome(with_it).token_ids == outcome(without).token_ids
    assert all(token.top == () and token.raw_p is None for _, verified in rounds(without) for token in verified.judged)


def test_a_judged_token_was_accepted_because_its_uniform_was_below_its_acceptance() -> None:
    settings = Settings(max_new_tokens=60, draft_length=4, temperature=1.0)
    target, draft = TableLM(random_table(1, V), context=99), TableLM(random_table(2, V), context=99)
    judged = 0
    for _, verified in rounds(decode(make_job(target, [0, 1], settings, LETTERS), "speculative", draft)):
        for token in verified.judged:
            assert token.acceptance == pytest.approx(min(1.0, token.p / token.q))
            if token.fate in ("accepted", "rejected"):
                assert (token.fate == "accepted") == (token.uniform < token.acceptance)
                judged += 1
    assert judged > 30


@pytest.mark.parametrize("verification", ["token", "block"])
def test_an_extra_token_is_drawn_at_its_own_positions_uniform(verification: Any) -> None:
    """So that whatever led to a position, the same distribution there gives the same token."""
    table = random_table(1, V)
    small = table + 0.5 * random_table(2, V)
    settings = Settings(max_new_tokens=60, draft_length=3, temperature=1.0, seed=8, verification=verification)
    events = decode(
        make_job(TableLM(table, context=99), [0, 1], settings, LETTERS), "speculative", TableLM(small, context=99)
    )
    tokens = [0, 1, shown_ids(events)[0]]
    kinds = []
    for _, verified in rounds(events):
        tokens += [token.id for token in verified.judged][: verified.num_accepted]
        p, q = table[tokens[-2], tokens[-1]].softmax(-1), small[tokens[-2], tokens[-1]].softmax(-1)
        assert verified.extra is not None
        if verified.extra_kind == "bonus" or verification == "token":
            weights = p if verified.extra_kind == "bonus" else (p.double() - q.double()).clamp(min=0)
            u = uniform(settings.seed, len(tokens), Purpose.TARGET)
            assert int(draw(weights, u)) == verified.extra.id
            kinds.append(verified.extra_kind)
        tokens.append(verified.extra.id)
    assert kinds.count("bonus") >= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pitfall_09_a_drafted_token_is_judged_with_the_penalty_on_the_draft_before_it(temperature: float) -> None:
    """The target wants 3 for ever and says 4, 5, ... only because 3 was said. A draft 3, 3, 3 keeps one 3."""
    table = torch.tensor([0.0, 0.0, 0.0, 80.0, 70.0, 60.0, *[0.0] * (V - 6)]).expand(V, V, V)
    settings = Settings(max_new_tokens=5, draft_length=3, temperature=temperature, repetition_penalty=4.0)
    events, _ = watched(TableLM(table), settings, [[4, 4, 4]])
    (_, verified), *_ = rounds(events)
    assert fates(verified) == ["accepted", "rejected", "discarded"]
    plain = decode(make_job(TableLM(table), [0, 1], settings, LETTERS))
    assert outcome(events).token_ids == outcome(plain).token_ids == (3, 4, 5, 3, 3)


def test_pitfall_14_hidden_tokens_are_counted_though_they_have_no_text() -> None:
    text = TokenText(byte_level_tokenizer("abcdefgh", special=["<think>", "</think>", "<s>", "</s>"]))
    events, _ = watched(TableLM(COUNTING), Settings(max_new_tokens=5, draft_length=2), [[3, 4]], text=text)
    assert outcome(events).text == shown_text(events) == "abc"
    assert outcome(events).token_ids == (2, 3, 4, 5, 6)
    assert fold(events).tokens == 5


# The clock, as the engines use it


class FakeTime:
    """A counter in place of the clock: each reading takes 1 ms."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.001
        return self.now


@each_method
def test_pitfall_18_time_suspended_at_a_yield_is_not_counted(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time = FakeTime()
    monkeypatch.setattr(clock, "time", time)
    settings = Settings(max_new_tokens=9, draft_length=2)
    job = make_job(TableLM(COUNTING), [0, 1], settings, LETTERS)
    lane = standard(job) if method == "standard" else speculative(job, drafter_factory(method, TableLM(COUNTING)))
    ts = []
    for event in lane:
        ts.append(event.t)
        time.now += 1000.0
    assert ts == sorted(ts)
    assert ts[0] == 0.0
    assert 0.0 < ts[-1] < 1.0


def test_pitfall_18_what_only_a_reader_needs_costs_the_lane_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time, explained = FakeTime(), 0
    monkeypatch.setattr(clock, "time", time)

    def slow(*arguments: Any) -> Any:
        nonlocal explained
        explained += 1
        time.now += 1000.0
        return explain(*arguments)

    monkeypatch.setattr(report, "explain", slow)
    job = make_job(TableLM(COUNTING), [0, 1], Settings(max_new_tokens=9, draft_length=2), LETTERS)
    events = decode(job, "speculative", TableLM(COUNTING))
    assert explained == 2 * len(rounds(events)) + 1
    assert outcome(events).t < 1.0


def test_pitfall_16_a_rounds_time_is_in_its_own_phases_and_not_in_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's forward takes 1 s and the draft model's 0.1 s, by a clock that only they move."""
    time = FakeTime()
    monkeypatch.setattr(clock, "time", time)

    class Slow(TableLM):
        def __init__(self, seconds: float) -> None:
            super().__init__(COUNTING)
            self.seconds = seconds

        def open(self, capacity: int) -> Any:
            cache = super().open(capacity)
            extend, seconds = cache.extend, self.seconds

            def slow(ids: Tensor, keep: int) -> Tensor:
                time.now += seconds
                return extend(ids, keep)

            cache.extend = slow  # type: ignore[method-assign]
            return cache

    events = decode(
        make_job(Slow(1.0), [0, 1], Settings(max_new_tokens=9, draft_length=3), LETTERS), "speculative", Slow(0.1)
    )
    prefilled = events[1]
    assert isinstance(prefilled, Prefilled)
    assert prefilled.target_s == pytest.approx(1.0, abs=0.05)
    assert prefilled.draft_s == pytest.approx(0.1, abs=0.05)
    assert prefilled.t == pytest.approx(1.1, abs=0.05)
    for drafted, verified in rounds(events):
        assert drafted.draft_s == pytest.approx(0.3, abs=0.05)
        assert verified.verify_s == pytest.approx(1.0, abs=0.05)
        assert verified.judge_s == pytest.approx(0.0, abs=0.05)
    metrics = fold(events)
    assert metrics.tpot_s == pytest.approx(2.6 / 8, abs=0.02)
    assert metrics.ttft_s == pytest.approx(1.1, abs=0.05)
    assert metrics.overhead_s == pytest.approx(0.0, abs=0.1)


# Invariants of any run


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "method": draw(st.sampled_from(METHODS)),
        "target": draw(st.integers(0, 3)),
        "draft": draw(st.integers(0, 5)),
        "prompt": draw(st.lists(st.integers(0, 4), min_size=1, max_size=8)),
        "eos_ids": frozenset(draw(st.sets(st.integers(0, 4), max_size=1))),
        "settings": Settings(
            max_new_tokens=draw(st.integers(1, 14)),
            temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
            top_k=draw(st.sampled_from([0, 2])),
            repetition_penalty=draw(st.sampled_from([1.0, 1.4])),
            seed=draw(st.integers(0, 5)),
            stop=tuple(draw(st.lists(st.sampled_from(["ab", "d", "ccc", "bca"]), max_size=1))),
            draft_length=draw(st.sampled_from([0, 1, 2, 3, 5, 16])),
            adaptive=draw(st.booleans()),
            verification=draw(st.sampled_from(["token", "block"])),
        ),
    }


def run(case: dict[str, Any]) -> tuple[list[Event], TableLM, TableLM]:
    target = TableLM(random_table(case["target"], 5), context=32)
    draft = TableLM(random_table(case["draft"], 5), context=32)
    job = make_job(target, case["prompt"], case["settings"], FIVE_LETTERS, eos_ids=case["eos_ids"])
    return decode(job, case["method"], draft), target, draft


@given(runs())
@hypothesis_settings(max_examples=100, deadline=None)
def test_pitfall_04_every_run_keeps_the_books(case: dict[str, Any]) -> None:
    events, target, draft = run(case)
    settings, finished = case["settings"], outcome(events)
    pairs = rounds(events)

    late_stop = len(finished.token_ids) < len(shown_ids(events))  # a stop string that took back earlier tokens
    assert not late_stop or finished.finish_reason == "stop"
    for drafted, verified in pairs:
        last = verified is pairs[-1][1]
        k = len(drafted.tokens)
        assert k <= settings.draft_length
        assert verified.num_accepted == fates(verified).count("accepted") <= emitted(verified)
        assert (0 if last and finished.finish_reason == "stop" else 1) <= emitted(verified) <= k + 1
        kinds = "".join(fate[0] for fate in fates(verified))  # accepted, rejected, discarded, clipped
        n = verified.num_accepted
        if verified.extra is not None:
            assert kinds == "a" * k if n == k else kinds == "a" * n + "r" + "d" * (k - n - 1)
            assert verified.extra_kind == ("bonus" if n == k else "recovered")
        else:
            assert last
            assert finished.finish_reason in ("eos", "stop")
            assert kinds == "a" * n + "c" * (k - n)
    if late_stop or finished.finish_reason == "stop":
        assert shown_text(events).startswith(finished.text)
        assert tuple(shown_ids(events)[: len(finished.token_ids)]) == finished.token_ids
    else:
        assert shown_text(events) == finished.text
        assert tuple(shown_ids(events)) == finished.token_ids
    assert 1 <= len(finished.token_ids) <= settings.max_new_tokens

    # one target forward a round and one for the prompt, each of what is not cached and the draft
    fed = extends(target)
    assert len(fed) == len(pairs) + 1
    assert (fed[0].cached, fed[0].count) == (0, len(case["prompt"]))
    for call, (drafted, _) in zip(fed[1:], pairs, strict=True):
        assert call.count == call.keep == len(drafted.tokens) + 1
    assert all(cache.closed == 1 for cache in [*target.opened, *draft.opened])
    # one of the draft model for the prompt, its proposals' own, and one that reads each draft that SSD speculates on,
    # which it does where its branches have room
    branches = settings.draft_length * (settings.fan_out_budget + 2)
    speculated = sum(
        case["method"] == "ssd" and len(drafted.tokens) > 0 and call.cached + 1 + branches <= draft.context_length
        for call, (drafted, _) in zip(fed[1:], pairs, strict=True)
    )
    assert len(draft.opened) + sum(drafted.draft_forwards for drafted, _ in pairs) + speculated == draft.forwards

    metrics = fold(events)
    assert metrics.tokens == len(finished.token_ids)
    assert metrics.accepted <= metrics.tokens
    assert sum(i * count for i, count in enumerate(metrics.accepted_histogram)) == metrics.accepted
    assert sum(metrics.accepted_histogram) == metrics.rounds == len(pairs)


@given(runs())
@hypothesis_settings(max_examples=40, deadline=None)
def test_pitfall_12_equal_runs_are_equal_events(case: dict[str, Any]) -> None:
    assert timeless(run(case)[0]) == timeless(run(case)[0])


@given(runs())
@hypothesis_settings(max_examples=40, deadline=None)
def test_temperature_0_gives_what_standard_decoding_gives_and_so_does_k_0(case: dict[str, Any]) -> None:
    settings = case["settings"]
    alike = [
        replace(settings, temperature=0.0),
        replace(settings, draft_length=0),
    ]
    for chosen in alike:
        theirs = outcome(run({**case, "settings": chosen})[0])
        ours = outcome(run({**case, "settings": chosen, "method": "standard"})[0])
        assert replace(theirs, t=0.0) == replace(ours, t=0.0)


def interleaved(lanes: Sequence[Iterator[Event]], order: Callable[[int], int]) -> list[list[Event]]:
    """Events of lanes that take turns in some order."""
    told: list[list[Event]] = [[] for _ in lanes]
    alive = list(range(len(lanes)))
    turn = 0
    while alive:
        lane = alive[order(turn) % len(alive)]
        event = next(lanes[lane], None)
        if event is None:
            alive.remove(lane)
        else:
            told[lane].append(event)
        turn += 1
    return told


@pytest.mark.parametrize("verification", ["token", "block"])
def test_pitfall_12_the_order_of_lanes_never_matters(verification: Any) -> None:
    """Four lanes over the same two models, in turns, in any order: each tells what it tells alone."""
    target, draft = TableLM(random_table(0, V), context=99), TableLM(random_table(1, V), context=99)
    settings = Settings(
        max_new_tokens=14, temperature=1.0, draft_length=4, adaptive=True, seed=3, verification=verification
    )

    def lanes() -> list[Iterator[Event]]:
        jobs = [make_job(target, [0, 1, 0, 1], settings, LETTERS, lane=method) for method in METHODS]
        return [
            standard(job) if job.lane == "standard" else speculative(job, drafter_factory(job.lane, draft))
            for job in jobs
        ]

    alone = [timeless(list(lane)) for lane in lanes()]
    for order in (lambda turn: 0, lambda turn: turn, lambda turn: -turn, lambda turn: turn * turn // 3):
        assert [timeless(told) for told in interleaved(lanes(), order)] == alone


# The draft length


def test_a_fixed_length_is_fixed() -> None:
    length = FixedDraftLength(4)
    for accepted in (0, 4, 2):
        assert length.next() == 4
        length.observe(4, accepted)


@pytest.mark.parametrize("cost_ratio", [0.0, 0.05, 0.3])
def test_an_adaptive_length_drafts_while_what_is_accepted_pays_for_what_is_drafted(cost_ratio: float) -> None:
    length = AdaptiveDraftLength(16, cost_ratio)
    accepted, drafted = 1.2, 2.0
    chosen = []
    for round_accepted in (3, 0, 0, 5, 1, *[0] * 40, 4, 4, 4):
        chosen.append(length.next())
        if accepted >= (cost_ratio + 0.03) * drafted:
            assert chosen[-1] == 16
        else:
            assert chosen[-1] <= 1
        kept = min(round_accepted, chosen[-1])
        length.observe(chosen[-1], kept)
        if chosen[-1]:
            accepted, drafted = 0.95 * accepted + kept, 0.95 * drafted + chosen[-1]
    assert {0, 16} <= set(chosen)


def test_an_adaptive_length_comes_back_when_a_probe_is_accepted() -> None:
    length = AdaptiveDraftLength(16, 0.1)
    while length.next() == 16:
        length.observe(16, 0)
    lengths = []
    for _ in range(200):
        lengths.append(length.next())
        length.observe(lengths[-1], lengths[-1])
    assert lengths[0] == 0
    assert lengths[-1] == 16


def test_an_adaptive_length_of_0_tries_one_token_now_and_then() -> None:
    length = AdaptiveDraftLength(8, 0.5)
    while (k := length.next()) > 0:
        length.observe(k, 0)
    lengths = []
    for _ in range(3 * (PROBE_EVERY + 1)):
        lengths.append(length.next())
        length.observe(lengths[-1], 0)
    assert lengths.count(1) == 3
    assert set(lengths) == {0, 1}


def test_an_adaptive_length_never_leaves_its_bounds() -> None:
    for longest in (0, 1, 2):
        length = AdaptiveDraftLength(longest, 0.0)
        for _ in range(40):
            k = length.next()
            assert 0 <= k <= longest
            length.observe(k, k)


def test_an_adaptive_run_stops_drafting_where_it_is_unsure_and_is_still_exact() -> None:
    table = random_table(0, V)
    settings = Settings(max_new_tokens=60, draft_length=8, adaptive=True)
    draft_table = 1.5 * table + 0.3 * random_table(1, V)
    target, draft = TableLM(table, context=99), TableLM(draft_table, context=99)
    events = decode(make_job(target, [0, 1], settings, LETTERS), "speculative", draft)
    plain = decode(make_job(target, [0, 1], settings, LETTERS))
    assert outcome(events).token_ids == outcome(plain).token_ids
    lengths = AdaptiveDraftLength(8, 0.1)
    done, chosen = 1, []
    for drafted, verified in rounds(events):
        longest = min(lengths.next(), 60 - done - 1)
        confidences = list(accumulate((token.top[0].prob for token in drafted.tokens), mul))
        assert all(confidence >= LEAST_CONFIDENCE for confidence in confidences[:-1])
        assert len(drafted.tokens) == longest or confidences[-1] < LEAST_CONFIDENCE
        chosen.append(len(drafted.tokens))
        lengths.observe(len(drafted.tokens), verified.num_accepted)
        done += emitted(verified)
    assert len(set(chosen)) >= 3
