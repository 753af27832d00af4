"""SSD drafts for verification outcomes ahead of time, and writes what plain speculative decoding writes."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TableLM, chain, chi_square_p, decode, drafter_factory, joint, letters, make_job, outcome, random_table
from torch import Tensor
from transformers import LlamaForCausalLM

from specdemo import methods
from specdemo.drafters.ssd import SSD
from specdemo.engines.job import Job
from specdemo.engines.speculative import speculative
from specdemo.errors import BadRequest, HelperLost
from specdemo.events import Drafted, Event, Prefilled, Verified
from specdemo.metrics import fold
from specdemo.models.lean import LeanLM
from specdemo.settings import Settings
from specdemo.ssd import cores as cores_module
from specdemo.ssd.cores import Cores, partners
from specdemo.ssd.fan_out import Experience, geometric, split, weights
from specdemo.ssd.helper import ProcessHelper, drafts_beside
from specdemo.ssd.saguaro import saguaro
from specdemo.trace import check, from_json, to_json

V = 8
LETTERS = letters(V)
TARGET = TableLM(random_table(0, V), context=2000)
DRAFT = TableLM(random_table(0, V) + random_table(5, V, scale=0.8), context=2000)
PROMPT = [0, 1, 2]

needs_fork = pytest.mark.skipif(not drafts_beside(TARGET, DRAFT), reason="the drafting process needs Linux")


def in_process(draft: Any) -> Callable[[Job], SSD]:
    """Drafters whose helper is a process."""

    def make(job: Job) -> SSD:
        helper = ProcessHelper(draft, job.target, job.settings, job.capacity, job.explain)
        return SSD(helper, draft, job.target, job.settings)

    return make


def ways_to_draft() -> dict[str, Callable[[Any], Callable[[Job], SSD]]]:
    ways: dict[str, Any] = {"here": lambda draft: drafter_factory("ssd", draft)}
    return ways | ({"in a process": in_process} if drafts_beside(TARGET, DRAFT) else {})


each_way = pytest.mark.parametrize("way", ways_to_draft().values(), ids=ways_to_draft().keys())


def verdicts(events: list[Event]) -> list[Verified]:
    return [event for event in events if isinstance(event, Verified)]


# The same tokens as plain speculative decoding


GREEDY, SAMPLED = Settings(), Settings(temperature=1.0)


@each_way
@pytest.mark.parametrize(
    "settings",
    [
        GREEDY,
        SAMPLED,
        replace(GREEDY, fan_out="geometric"),
        replace(SAMPLED, fan_out="geometric"),
        replace(SAMPLED, fan_out="uniform"),
        Settings(temperature=0.8, top_k=4, repetition_penalty=1.2),
        Settings(repetition_penalty=1.3),
        replace(GREEDY, adaptive=True),
        replace(SAMPLED, adaptive=True),
    ],
    ids=lambda settings: f"{settings.temperature} {settings.fan_out} {settings.repetition_penalty} {settings.adaptive}",
)
def test_the_tokens_are_those_of_speculative_decoding_on_hits_and_on_misses(
    settings: Settings, way: Callable[[Any], Callable[[Job], SSD]]
) -> None:
    settings = replace(settings, max_new_tokens=40, draft_length=3, fan_out_budget=4)
    rates = []
    for seed in (1, 2):
        job = make_job(TARGET, PROMPT, replace(settings, seed=seed), LETTERS)
        ours = list(speculative(job, way(DRAFT)))
        plain = decode(job, "speculative", DRAFT)
        assert outcome(ours).token_ids == outcome(plain).token_ids
        drafts, plain_drafts = ([e.tokens for e in events if isinstance(e, Drafted)] for events in (ours, plain))
        assert [[(t.id, t.q) for t in tokens] for tokens in drafts] == [
            [(t.id, pytest.approx(t.q)) for t in tokens] for tokens in plain_drafts
        ]
        rates.append(fold(ours).hit_rate)
    assert all(rate and rate > 0.1 for rate in rates)
    assert settings.greedy or min(rates) < 1.0


@each_way
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_lean_pair_writes_the_same_with_ssd(
    tiny_target: LlamaForCausalLM, tiny_draft: LlamaForCausalLM, temperature: float, way: Any
) -> None:
    """The branches of the lean forward are what its own cache would have given."""
    target = LeanLM.from_transformers(tiny_target, "target")
    draft = LeanLM.from_transformers(tiny_draft, "draft")
    rates = []
    for k, budget, seed in ((1, 3, 0), (4, 16, 1), (6, 40, 2)):
        settings = Settings(
            max_new_tokens=32,
            draft_length=k,
            fan_out_budget=budget,
            temperature=temperature,
            seed=seed,
            ignore_eos=True,
        )
        job = make_job(target, [1, 5, 9, 5], settings, letters(96))
        ours, plain = list(speculative(job, way(draft))), decode(job, "speculative", draft)
        assert outcome(ours).token_ids == outcome(plain).token_ids
        assert fold(ours).accepted_histogram == fold(plain).accepted_histogram
        rates.append(fold(ours).hit_rate or 0.0)
    assert max(rates) > 0.2


RUNS = 400
FOUR_LETTERS = letters(4)


@pytest.mark.parametrize("verification", ["token", "block"])
def test_the_output_is_distributed_as_the_targets_own_with_saguaro(verification: Any) -> None:
    """Three tokens after the prompt, over a vocabulary of 4, at temperature 1; with prompt lookup on misses, so that a
    miss and a hit propose differently."""
    target, draft = TableLM(random_table(3, 4), context=200), TableLM(random_table(4, 4), context=200)
    counts: Counter[tuple[int, ...]] = Counter()
    hits: Counter[bool | None] = Counter()
    for seed in range(RUNS):
        settings = Settings(
            max_new_tokens=4, draft_length=2, fan_out_budget=3, temperature=1.0, seed=seed,
            saguaro=0.4, verification=verification, fallback="prompt-lookup",
        )  # fmt: skip
        events = decode(make_job(target, [0, 1], settings, FOUR_LETTERS, explain=False), "ssd", draft)
        counts[outcome(events).token_ids[:3]] += 1
        hits.update(event.hit for event in verdicts(events))
    assert min(hits[True], hits[False]) > RUNS / 5
    assert chi_square_p(dict(counts), joint(target.table, [0, 1], 3)) > 1e-3


def test_a_draft_distribution_that_is_not_told_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above fails where q is told without Saguaro's change: its mutant."""
    from specdemo.ssd import board

    target, draft = TableLM(random_table(3, 4), context=200), TableLM(random_table(4, 4), context=200)
    write, write_proposal = board.Board.write_step, board.Board.write_proposal

    def undo(probs: Tensor) -> Tensor:
        return probs.square() / probs.square().sum(-1, keepdim=True)

    def write_step(self: Any, rows: slice, index: int, step: Any) -> None:
        write(self, rows, index, step._replace(probs=undo(step.probs)))

    def write_one(self: Any, proposal: Any) -> None:
        write_proposal(self, replace(proposal, probs=undo(proposal.probs)) if len(proposal.tokens) else proposal)

    monkeypatch.setattr(board.Board, "write_step", write_step)
    monkeypatch.setattr(board.Board, "write_proposal", write_one)
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(RUNS):
        settings = Settings(max_new_tokens=4, draft_length=2, fan_out_budget=3, temperature=1.0, seed=seed, saguaro=0.4)
        events = decode(make_job(target, [0, 1], settings, FOUR_LETTERS, explain=False), "ssd", draft)
        counts[outcome(events).token_ids[:3]] += 1
    assert chi_square_p(dict(counts), joint(target.table, [0, 1], 3)) < 1e-4


# Branches


def test_branches_are_what_the_cache_would_have_given_and_leave_it_as_it_was(tiny_draft: LlamaForCausalLM) -> None:
    lm = LeanLM.from_transformers(tiny_draft, "draft")
    text = torch.tensor([1, 5, 9, 5, 7, 3, 11, 2, 30, 8])
    cache = lm.open(100)
    cache.extend(text, keep=1)
    after = torch.tensor([6, 10, 8, 10])
    branches = cache.branches(after)
    fed = torch.tensor([[4, 6, 8, 10], [40, 41, 42, 43], [12, 13, 14, 15]])
    steps = [branches.extend(ids).clone() for ids in fed[:2]]
    branches.only(2)
    last = branches.extend(fed[2, 2:3])
    assert cache.cached == 10
    for index, length in enumerate(after.tolist()):
        alone = lm.open(100)
        alone.extend(text[:length], keep=1)
        for step, ids in zip(steps, fed[:2], strict=True):
            torch.testing.assert_close(step[index], alone.extend(ids[index : index + 1], keep=1)[0])
        if index == 2:
            torch.testing.assert_close(last[0], alone.extend(fed[2, 2:3], keep=1)[0])
    untouched = lm.open(100)
    untouched.extend(text, keep=1)
    more = torch.tensor([17, 18])
    torch.testing.assert_close(cache.extend(more, keep=2), untouched.extend(more, keep=2))


def test_more_branches_than_queries_are_folded_are_the_same(tiny_draft: LlamaForCausalLM) -> None:
    """Attention takes another way for many rows."""
    lm = LeanLM.from_transformers(tiny_draft, "draft")
    cache = lm.open(300)
    cache.extend(torch.tensor([1, 5, 9]), keep=1)
    many, few = cache.branches(torch.full((80,), 3)), torch.arange(80)
    rows = many.extend(few).clone()
    one = cache.branches(torch.tensor([3]))
    torch.testing.assert_close(rows[7:8], one.extend(torch.tensor([7])))


def test_branches_need_room(tiny_draft: LlamaForCausalLM) -> None:
    cache = LeanLM.from_transformers(tiny_draft, "draft").open(10)
    cache.extend(torch.tensor([1, 5, 9, 4, 4, 4, 4, 4]), keep=1)
    branches = cache.branches(torch.tensor([8, 8, 8]))
    with pytest.raises(ValueError, match="more than the cache's 10"):
        branches.extend(torch.tensor([1, 2, 3]))


# No guess used the answer


class Delayed:
    """A target whose answers take a while, as real ones do, in which a helper can work."""

    def __init__(self, lm: TableLM, seconds: float) -> None:
        self._lm, self._seconds = lm, seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lm, name)

    def open(self, capacity: int) -> Any:
        cache = self._lm.open(capacity)
        extend = cache.extend

        def slow(ids: Tensor, keep: int) -> Tensor:
            time.sleep(self._seconds)
            return extend(ids, keep)

        cache.extend = slow  # type: ignore[method-assign]
        return cache


@needs_fork
def test_guesses_are_chosen_before_the_outcome_is_known_and_drafts_are_made_meanwhile() -> None:
    settings = Settings(max_new_tokens=24, draft_length=3, fan_out_budget=6)
    job = make_job(Delayed(TARGET, 0.2), PROMPT, settings, LETTERS)  # type: ignore[arg-type]
    events = list(speculative(job, in_process(DRAFT)))
    ahead = [event.speculation for event in verdicts(events) if event.speculation]
    assert len(ahead) > 5
    for round in ahead:
        assert 0.0 < round.guessed_s < round.known_s
        assert round.guessed_s <= round.built_s
        assert 0.0 <= round.hidden_s <= round.build_s + 1e-9
        assert round.overlap == "process"
    metrics = fold(events)
    assert metrics.hidden_share is not None
    assert metrics.hidden_share > 0.7  # of little work beside a long verification, on a busy machine too
    check([from_json(to_json(event)) for event in events])


@each_way
def test_what_is_guessed_does_not_depend_on_the_answer(way: Any) -> None:
    """Two targets with the same first token and different ones behind it: the first round's guesses are equal."""
    other = TableLM(TARGET.table.clone(), context=2000)
    settings = Settings(max_new_tokens=12, draft_length=3, fan_out_budget=5)
    first = next(e for e in decode(make_job(TARGET, PROMPT, settings, LETTERS)) if isinstance(e, Prefilled)).token.id
    for last in range(V):
        other.table[first, last] = -TARGET.table[first, last]
        other.table[PROMPT[-1], first] = -TARGET.table[PROMPT[-1], first]
    rounds = []
    for target in (TARGET, other):
        job = make_job(target, PROMPT, settings, LETTERS)
        rounds.append(verdicts(list(speculative(job, way(DRAFT))))[0])
    a, b = (round.speculation for round in rounds)
    assert a is not None
    assert b is not None
    assert rounds[0].outcome != rounds[1].outcome
    assert [(g.num_accepted, g.id, g.rank) for g in a.guesses] == [(g.num_accepted, g.id, g.rank) for g in b.guesses]


# What events tell


@each_way
def test_a_hit_is_the_next_draft_and_a_miss_is_drafted_just_in_time(way: Any) -> None:
    settings = Settings(max_new_tokens=60, draft_length=3, fan_out_budget=2, temperature=1.0)
    events = list(speculative(make_job(TARGET, PROMPT, settings, LETTERS), way(DRAFT)))
    check(events)
    drafted = [event for event in events if isinstance(event, Drafted)]
    seen = set()
    for before, after in zip(verdicts(events), drafted[1:], strict=False):
        ahead = before.speculation
        assert ahead is not None
        assert before.extra is not None
        assert before.outcome == (before.num_accepted, before.extra.id)
        taken = [guess for guess in ahead.guesses if guess.taken]
        assert len(taken) == bool(before.hit)
        if not after.tokens:
            continue
        assert after.origin == ("cache" if before.hit else "model")
        assert after.draft_forwards == (0 if before.hit else len(after.tokens))
        if before.hit:
            ids = [token.id for token in after.tokens]
            assert list(taken[0].draft[: len(ids)]) == ids
            assert taken[0].draft_text.startswith("".join(LETTERS.piece(id) for id in ids))
        assert sum(ahead.fan_out) == len(ahead.guesses) <= 2
        seen.add(before.hit)
    assert seen == {True, False}


def test_an_unexplained_run_keeps_its_guesses_to_itself_and_counts_the_same() -> None:
    settings = Settings(max_new_tokens=60, draft_length=3, fan_out_budget=2, temperature=1.0)
    told, untold = (
        decode(make_job(TARGET, PROMPT, settings, LETTERS, explain=explain), "ssd", DRAFT) for explain in (True, False)
    )
    assert all(event.speculation is None or not event.speculation.guesses for event in verdicts(untold))
    assert fold(told).hit_rate == fold(untold).hit_rate
    assert fold(told).recall_by_fan_out == fold(untold).recall_by_fan_out


def test_a_round_that_ends_inside_the_draft_has_no_outcome() -> None:
    table = chain({}, V)
    target, draft = TableLM(table, context=500), TableLM(table, context=500)
    settings = Settings(max_new_tokens=30, draft_length=4, fan_out_budget=4)
    job = make_job(target, [0, 1], settings, LETTERS, eos_ids=frozenset({6}))
    events = decode(job, "ssd", draft)
    assert outcome(events).token_ids == (2, 3, 4, 5, 6)
    last = verdicts(events)[-1]
    assert (last.extra, last.outcome, last.hit, last.speculation) == (None, None, None, None)


def test_hits_are_counted_by_fan_out_and_recall_says_what_each_would_have_found() -> None:
    settings = Settings(max_new_tokens=100, draft_length=3, temperature=1.0, fan_out="uniform")
    by_budget = {}
    for fan_out in (1, 2, 4):
        job = make_job(TARGET, PROMPT, replace(settings, fan_out_budget=4 * fan_out), LETTERS, explain=False)
        by_budget[fan_out] = fold(decode(job, "ssd", DRAFT))
    for fan_out, metrics in by_budget.items():
        assert metrics.hit_rate == pytest.approx(dict(metrics.recall_by_fan_out)[fan_out])
        assert dict(metrics.hit_rate_by_fan_out)[fan_out] == pytest.approx(metrics.hit_rate, abs=0.05)
    assert by_budget[1].hit_rate < by_budget[4].hit_rate  # type: ignore[operator]
    assert by_budget[1].tokens_on_hit
    assert by_budget[1].tokens_on_miss
    assert fold(decode(make_job(TARGET, PROMPT, settings, LETTERS), "speculative", DRAFT)).recall_by_fan_out == ()


@pytest.mark.parametrize("context", [30, 64])
def test_near_the_end_of_the_drafts_context_it_goes_on_without_guesses(context: int) -> None:
    draft = TableLM(DRAFT.table, context=context)
    settings = Settings(max_new_tokens=70, draft_length=3, fan_out_budget=4)
    job = make_job(TARGET, PROMPT, settings, LETTERS)
    assert outcome(decode(job, "ssd", draft)).token_ids == outcome(decode(job)).token_ids


# The helper's life


def children() -> list[int]:
    """Processes that this one started and that still run."""
    found: list[int] = []
    for thread in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread may end meanwhile: it has no children then
            found += map(int, (thread / "children").read_text().split())
    return found


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before, cores, threads = set(children()), os.sched_getaffinity(0), torch.get_num_threads()
    yield
    assert set(children()) <= before
    assert os.sched_getaffinity(0) == cores
    assert torch.get_num_threads() == threads


@needs_fork
@pytest.mark.usefixtures("nothing_left")
def test_a_helper_that_dies_is_an_error_within_a_second_and_the_next_run_works() -> None:
    settings = Settings(max_new_tokens=90, draft_length=3, fan_out_budget=4)
    job = make_job(TARGET, PROMPT, settings, LETTERS)
    before = set(children())
    events = speculative(job, in_process(DRAFT))
    for _ in range(8):
        next(events)
    (helper,) = set(children()) - before
    os.kill(helper, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(HelperLost, match=r"has ended \(exit code -9\)"):
        list(events)
    assert time.monotonic() - killed < 1.0
    assert outcome(list(speculative(job, in_process(DRAFT)))).token_ids == outcome(decode(job)).token_ids


@needs_fork
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("forward", [0, 1, 3, 7])
def test_a_draft_model_that_fails_in_the_helper_is_an_error_that_says_so(forward: int) -> None:
    draft = TableLM(DRAFT.table, context=2000)
    draft.fail_at = forward
    with pytest.raises(HelperLost, match="the model broke"):
        list(speculative(make_job(TARGET, PROMPT, Settings(max_new_tokens=90), LETTERS), in_process(draft)))


@needs_fork
@pytest.mark.usefixtures("nothing_left")
def test_a_silent_helper_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.ssd.helper.PATIENCE_S", 0.3)
    before = set(children())
    events = speculative(make_job(TARGET, PROMPT, Settings(max_new_tokens=400), LETTERS), in_process(DRAFT))
    for _ in range(6):
        next(events)
    (helper,) = set(children()) - before
    os.kill(helper, signal.SIGSTOP)
    with pytest.raises(HelperLost, match="silent"):
        list(events)


@needs_fork
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_a_closed_run_leaves_no_process(after: int) -> None:
    events = speculative(make_job(TARGET, PROMPT, Settings(max_new_tokens=90), LETTERS), in_process(DRAFT))
    for _ in range(after):
        next(events)
    events.close()


@needs_fork
@pytest.mark.usefixtures("nothing_left")
def test_a_helper_keeps_no_connection_of_its_parent_open() -> None:
    before = set(children())
    with socket.socket() as listening:
        events = speculative(make_job(TARGET, PROMPT, Settings(max_new_tokens=90), LETTERS), in_process(DRAFT))
        next(events)
        next(events)
        (helper,) = set(children()) - before
        kept = [link.readlink() for link in Path(f"/proc/{helper}/fd").iterdir() if int(link.name) > 2]
        assert len(kept) == 1, kept  # its pipe
        assert Path(f"/proc/self/fd/{listening.fileno()}").readlink() not in kept
        events.close()


@needs_fork
@pytest.mark.usefixtures("nothing_left")
def test_a_target_that_fails_leaves_no_process() -> None:
    target = TableLM(TARGET.table, context=2000)
    target.fail_at = 4
    with pytest.raises(RuntimeError, match="the model broke"):
        list(speculative(make_job(target, PROMPT, Settings(max_new_tokens=90), LETTERS), in_process(DRAFT)))


@needs_fork
@pytest.mark.usefixtures("nothing_left")
def test_between_rounds_the_lane_has_all_processors_and_the_helper_rests() -> None:
    """What a lane leaves running while it is suspended would be work that nobody's clock counts."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    before = set(children())
    job = make_job(TARGET, PROMPT, Settings(max_new_tokens=60), LETTERS)
    for index, event in enumerate(speculative(job, in_process(DRAFT))):
        if isinstance(event, Verified):
            assert os.sched_getaffinity(0) == cores
            assert torch.get_num_threads() == threads
            if index % 5 == 0:
                (helper,) = set(children()) - before
                used = [_cpu_ticks(helper), time.sleep(0.05), _cpu_ticks(helper)]
                assert used[0] == used[2]


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@needs_fork
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("threads", [1, 2])
def test_the_target_takes_its_processor_back_when_the_drafts_are_made(
    tiny_target: LlamaForCausalLM, threads: int, set_threads: Callable[[int], None]
) -> None:
    """In the middle of a pass: the helper has long been idle when the second layer begins. A single thread may go
    anywhere then; of two, the other one is there."""
    set_threads(threads)
    target = LeanLM.from_transformers(tiny_target, "target")
    cores = os.sched_getaffinity(0)
    helper = ProcessHelper(DRAFT, target, Settings(draft_length=2, fan_out_budget=3), 50, False)
    cache = target.open(50)
    try:
        helper.prefill(PROMPT)
        helper.speculate([*PROMPT, 3], [1, 2])
        assert len(os.sched_getaffinity(0)) == max(1, len(cores) - 1)
        deadline = time.monotonic() + 5.0
        while helper.board.busy and time.monotonic() < deadline:
            time.sleep(0.01)
        assert torch.get_num_threads() == max(1, min(threads, len(cores) - 1))
        cache.extend(torch.tensor([1, 2]), keep=1)
        assert torch.get_num_threads() == threads
        if threads == 1:
            assert os.sched_getaffinity(0) == cores
        assert helper.settle(0, 5).speculation.overlap == "process"
        assert os.sched_getaffinity(0) == cores
    finally:
        helper.close()
    assert target.between_layers is None


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def _decode_until_killed(told: Connection) -> None:
    job = make_job(TARGET, PROMPT, Settings(max_new_tokens=900), LETTERS)
    for index, _event in enumerate(speculative(job, in_process(DRAFT))):
        if index == 5:
            told.send(children()[0])
            time.sleep(60)


@needs_fork
@pytest.mark.usefixtures("nothing_left")
def test_a_helper_does_not_outlive_a_killed_parent() -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_decode_until_killed, args=(theirs,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside other threads
        parent.start()
    assert ours.poll(10.0)
    helper = ours.recv()
    assert _lives(helper)
    parent.kill()
    parent.join()
    deadline = time.monotonic() + 5.0
    while _lives(helper):
        assert time.monotonic() < deadline, "the helper goes on without its parent"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# Rules


@needs_fork
def test_of_two_processors_each_thread_of_the_target_has_its_own(set_threads: Callable[[int], None]) -> None:
    before = os.sched_getaffinity(0)
    two = set(sorted(before)[:2])
    alone, lent = {min(two)}, {max(two)}
    try:
        os.sched_setaffinity(0, two)
        set_threads(2)
        cores = Cores()
        working = partners()
        assert len(working) == 1
        cores.share()
        assert torch.get_num_threads() == 1
        assert [os.sched_getaffinity(thread) for thread in (0, *working)] == [alone, lent]
        cores.join_in()
        assert torch.get_num_threads() == 2
        assert [os.sched_getaffinity(thread) for thread in (0, *working)] == [alone, lent]
        cores.take_back()
        assert [os.sched_getaffinity(thread) for thread in (0, *working)] == [two, two]
        for thread in working:
            os.sched_setaffinity(thread, before)
    finally:
        os.sched_setaffinity(0, before)


@needs_fork
def test_a_partner_that_has_ended_is_no_error(
    set_threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    monkeypatch.setattr(cores_module, "partners", lambda: [ended.native_id])
    try:
        os.sched_setaffinity(0, set(sorted(before)[:2]))
        set_threads(2)
        cores = Cores()
        cores.share()
        cores.join_in()
        cores.take_back()
        assert os.sched_getaffinity(0) == set(sorted(before)[:2])
    finally:
        os.sched_setaffinity(0, before)


def test_a_budget_is_split_whole_and_by_share() -> None:
    assert split(16, [1.0, 1.0, 1.0, 1.0]) == [4, 4, 4, 4]
    assert split(6, [1.0, 1.0, 1.0, 1.0]) == [2, 2, 1, 1]
    assert split(8, [0.5, 0.25, 0.25]) == [4, 2, 2]
    for budget in range(1, 40):
        assert sum(split(budget, [0.9, 0.31, 0.2, 0.7])) == budget


def test_the_geometric_rule_is_the_articles() -> None:
    a, r, k = 0.6, 0.5, 3
    shares = geometric(a, r, k)
    assert shares[:k] == pytest.approx([a ** (i / (1 + r)) for i in range(k)])
    assert shares[k] == pytest.approx(a ** (k / (1 + r)) * (1 - a) ** (-1 / (1 + r)))
    assert all(map(math.isfinite, geometric(1.0, 1.0, 4)))


def test_experience_learns_acceptance_and_how_chances_fall_with_the_rank() -> None:
    experience = Experience()
    for _ in range(2000):
        experience.learn(2, 3, 0)
        experience.learn(0, 3, 3)
    assert experience.acceptance == pytest.approx(2 / 4, abs=0.01)
    assert experience.exponent == pytest.approx(1 / (math.log(4) / 2), abs=0.02)


def test_the_likeliest_outcomes_are_guessed_by_the_drafts_own_probabilities() -> None:
    candidates = torch.tensor([[0.3, 0.1], [0.05, 0.01], [0.6, 0.2]])  # after 0, 1 and 2 drafted tokens
    drafted = torch.tensor([0.5, 0.9])
    found = weights(Settings(), candidates, drafted, Experience())
    chances = [[0.3, 0.1], [0.5 * 0.05, 0.5 * 0.01], [0.45 * 0.6, 0.45 * 0.2]]
    torch.testing.assert_close(found, torch.tensor(chances))
    sampled = weights(Settings(temperature=1.0), candidates, drafted, Experience())
    assert sampled[0, 0] == pytest.approx((1 - Experience().acceptance) * 0.3 / 0.5)


def test_saguaro_holds_back_on_the_likeliest_tokens_and_sums_to_one() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.1, 0.1]])
    settings = Settings(temperature=1.0, saguaro=0.5, draft_length=3, fan_out_budget=8)  # two guesses a position
    torch.testing.assert_close(saguaro(probs, settings), torch.tensor([[0.25, 0.15, 0.1, 0.1]]) / 0.6)
    assert saguaro(probs, replace(settings, saguaro=1.0)) is probs
    assert saguaro(probs, replace(settings, temperature=0.0)) is probs


def test_saguaro_earns_hits() -> None:
    """And costs acceptance: sums over a few runs."""

    def sums(factor: float) -> tuple[float, float]:
        settings = Settings(max_new_tokens=80, draft_length=2, fan_out_budget=3, temperature=1.0, saguaro=factor)
        jobs = [make_job(TARGET, PROMPT, replace(settings, seed=seed), LETTERS, explain=False) for seed in range(2)]
        runs = [fold(decode(job, "ssd", DRAFT)) for job in jobs]
        return sum(run.hit_rate or 0.0 for run in runs), sum(run.acceptance_rate or 0.0 for run in runs)

    (hits, accepted), (more_hits, fewer_accepted) = sums(1.0), sums(0.2)
    assert more_hits > hits
    assert fewer_accepted < accepted


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"fan_out": "learned"}, "fan-out must be"),
        ({"fan_out_budget": 0}, "fan-out budget"),
        ({"fan_out_budget": 65}, "fan-out budget"),
        ({"saguaro": 0.0}, "saguaro"),
        ({"saguaro": 1.5}, "saguaro"),
        ({"fallback": "hybrid"}, "fallback"),
    ],
)
def test_settings_are_checked(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Settings(**wrong)


def test_a_draft_model_that_cannot_branch_runs_as_speculative_and_says_so() -> None:
    draft = TableLM(DRAFT.table, name="small")
    draft.branching = False  # type: ignore[misc]
    pair: Any = type("Pair", (), {"target": TARGET, "draft": draft})()
    method, notes = methods.resolve(pair, "ssd")
    assert method.name == "speculative"
    assert "small cannot draft for several outcomes" in notes[0]
