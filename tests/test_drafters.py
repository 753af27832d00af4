"""What every drafter promises, asked of each one; then what each does of its own.

A new drafter is added to DRAFTERS and passes before it is listed as a method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from tiny import TableLM, chain, decode, letters, make_job, outcome, random_table, rounds
from torch import Tensor

from specdemo.drafters import draft_model
from specdemo.drafters.base import Drafter, Proposal
from specdemo.drafters.draft_model import DraftModel
from specdemo.drafters.hybrid import Hybrid
from specdemo.drafters.prompt_lookup import LONGEST, POSITION_COST, PRIOR, PRIOR_WEIGHT, PromptLookup
from specdemo.drafters.ssd import SSD
from specdemo.engines.speculative import speculative
from specdemo.metrics import fold
from specdemo.sampling import Purpose, draw, to_probs, uniform
from specdemo.settings import Settings
from specdemo.ssd.helper import LocalHelper

V, CAPACITY = 8, 60
LETTERS = letters(V)
TARGET = TableLM(random_table(0, V))
PROMPT = [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


@dataclass
class Made:
    drafter: Drafter
    lm: TableLM | None


def make_prompt_lookup(settings: Settings) -> Made:
    return Made(PromptLookup(TARGET.device), None)


def make_draft_model(settings: Settings) -> Made:
    lm = TableLM(random_table(1, V))
    return Made(DraftModel(lm, TARGET, settings, CAPACITY), lm)


def make_hybrid(settings: Settings) -> Made:
    lm = TableLM(random_table(1, V))
    return Made(Hybrid(lm, TARGET, settings, CAPACITY), lm)


REDUCED_IDS = torch.tensor([6, 0, 3, 1])


def make_reduced(settings: Settings) -> Made:
    """A draft model whose output knows four of the target's ids, in an order of its own."""
    lm = TableLM(random_table(1, V, columns=4), vocab_ids=REDUCED_IDS)
    return Made(DraftModel(lm, TARGET, settings, CAPACITY), lm)


def make_ssd(settings: Settings) -> Made:
    lm = TableLM(random_table(1, V), context=400)
    return Made(SSD(LocalHelper(lm, TARGET, settings, CAPACITY, True), lm, TARGET, settings), lm)


def make_reduced_ssd(settings: Settings) -> Made:
    lm = TableLM(random_table(1, V, columns=4), vocab_ids=REDUCED_IDS, context=400)
    return Made(SSD(LocalHelper(lm, TARGET, settings, CAPACITY, True), lm, TARGET, settings), lm)


DRAFTERS: dict[str, Callable[[Settings], Made]] = {
    "prompt lookup": make_prompt_lookup,
    "draft model": make_draft_model,
    "draft model with a reduced vocabulary": make_reduced,
    "hybrid": make_hybrid,
    "ssd": make_ssd,
    "ssd with a reduced vocabulary": make_reduced_ssd,
}

each_drafter = pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS.keys())
GREEDY, SAMPLED = Settings(), Settings(temperature=1.0)
each_settings = pytest.mark.parametrize(
    "settings",
    [GREEDY, SAMPLED, Settings(temperature=0.7, top_k=3, repetition_penalty=1.3), Settings(temperature=1, top_p=0.6)],
    ids=["greedy", "sampled", "top-k and penalty", "top-p"],
)


def started(make: Callable[[Settings], Made], settings: Settings, first: int = 2) -> tuple[Made, list[int]]:
    """A drafter after the prompt, with the prefill's token committed."""
    made = make(settings)
    made.drafter.prefill(PROMPT)
    made.drafter.propose(PROMPT, 0)
    tokens = [*PROMPT, first]
    made.drafter.observe(tokens)
    return made, tokens


def check(proposal: Proposal, tokens: Sequence[int], draft_length: int) -> None:
    k = len(proposal.tokens)
    assert proposal.tokens.dtype == torch.long
    assert proposal.tokens.ndim == 1
    assert k <= draft_length
    assert all(0 <= id < V for id in proposal.tokens.tolist())
    if proposal.probs is not None:
        assert proposal.probs.shape == (k, V)
        torch.testing.assert_close(proposal.probs.sum(-1), torch.ones(k))
        assert bool((proposal.probs.gather(1, proposal.tokens[:, None]) > 0).all()), "drawn with probability 0"
    if proposal.logits is not None:
        assert proposal.logits.shape[0] == k
        assert proposal.logits.shape[1] == (V if proposal.vocab_ids is None else len(proposal.vocab_ids))
    assert proposal.origin in ("model", "lookup", "none", "cache")
    assert (k == 0) == (proposal.origin == "none")
    assert proposal.forwards == (k if proposal.origin == "model" else 0)


# The contract


@each_drafter
@each_settings
@pytest.mark.parametrize("draft_length", [0, 1, 2, 5, 16])
def test_a_proposal_has_its_shape_and_at_most_k_tokens(
    make: Callable[[Settings], Made], settings: Settings, draft_length: int
) -> None:
    made, tokens = started(make, settings)
    for committed in (3, 0, 5):
        proposal = made.drafter.propose(tokens, draft_length)
        check(proposal, tokens, draft_length)
        kept = proposal.tokens.tolist()[:1]
        tokens = [*tokens, *kept, committed]
        made.drafter.observe(tokens)
    made.drafter.close()


@each_drafter
@each_settings
def test_what_is_proposed_depends_on_the_tokens_and_not_on_earlier_drafts(
    make: Callable[[Settings], Made], settings: Settings
) -> None:
    """After any verdict a drafter proposes what a fresh one proposes for the same text: the rollback is complete."""
    long, tokens = started(make, settings)
    for keep, committed in ((0, 3), (2, 1), (5, 2), (1, 0), (0, 1)):
        drafted = long.drafter.propose(tokens, 5).tokens.tolist()
        tokens = [*tokens, *drafted[:keep], committed]
        long.drafter.observe(tokens)
    fresh = make(settings)
    fresh.drafter.prefill(tokens[:-1])
    fresh.drafter.propose(tokens[:-1], 0)
    fresh.drafter.observe(tokens)
    a, b = long.drafter.propose(tokens, 4), fresh.drafter.propose(tokens, 4)
    assert a.tokens.tolist() == b.tokens.tolist()
    assert (a.probs is None) == (b.probs is None)
    if a.probs is not None and b.probs is not None:
        assert torch.equal(a.probs, b.probs)


@each_drafter
def test_pitfall_12_two_equal_runs_propose_alike(make: Callable[[Settings], Made]) -> None:
    def proposals() -> list[list[int]]:
        made, tokens = started(make, SAMPLED)
        found = []
        for committed in (3, 0, 1, 2):
            found.append(made.drafter.propose(tokens, 3).tokens.tolist())
            tokens = [*tokens, committed]
            made.drafter.observe(tokens)
        made.drafter.close()
        return found

    assert proposals() == proposals()


@each_drafter
def test_closing_releases_the_cache_and_may_be_repeated(make: Callable[[Settings], Made]) -> None:
    made, tokens = started(make, SAMPLED)
    made.drafter.propose(tokens, 3)
    made.drafter.close()
    made.drafter.close()
    if made.lm is not None:
        assert [cache.closed > 0 for cache in made.lm.opened] == [True]


@each_drafter
@pytest.mark.parametrize("verification", ["token", "block"])
def test_it_decodes_to_the_targets_own_greedy_text(make: Callable[[Settings], Made], verification: Any) -> None:
    settings = Settings(max_new_tokens=20, draft_length=4, verification=verification)
    job = make_job(TARGET, PROMPT, settings, LETTERS)
    events = list(speculative(job, lambda job: make(job.settings).drafter))
    assert outcome(events).token_ids == outcome(decode(job)).token_ids
    assert fold(events).drafted > 0


@each_drafter
@each_settings
def test_pitfall_05_q_is_the_distribution_that_was_drawn_from(
    make: Callable[[Settings], Made], settings: Settings
) -> None:
    """None says one-hot, so then nothing may have been drawn: another seed proposes the same. Else inverting q at the
    run's own uniform gives the token."""
    made, tokens = started(make, settings, first=5)
    proposal = made.drafter.propose(tokens, 4)
    assert len(proposal.tokens) > 0 or made.lm is None
    if proposal.probs is None:
        other, _ = started(make, replace(settings, seed=99), first=5)
        assert other.drafter.propose(tokens, 4).tokens.tolist() == proposal.tokens.tolist()
    else:
        for i, (row, id) in enumerate(zip(proposal.probs, proposal.tokens.tolist(), strict=True)):
            assert int(draw(row, uniform(settings.seed, len(tokens) + i, Purpose.DRAFT))) == id


# The draft model


def expected_q(lm: TableLM, settings: Settings, tokens: list[int]) -> Tensor:
    """q after `tokens`, filtered as the target would be, over the target's ids."""
    logits = lm.table[tokens[-2], tokens[-1]]
    if lm.vocab_ids is not None:
        logits = torch.full((V,), -torch.inf).index_copy(0, lm.vocab_ids, logits)
    return to_probs(logits[None], settings, tokens)[0]


@each_settings
@pytest.mark.parametrize("make", [make_draft_model, make_reduced])
def test_pitfall_09_q_is_filtered_and_penalised_as_the_target_is_on_prefix_and_draft(
    make: Callable[[Settings], Made], settings: Settings
) -> None:
    made, tokens = started(make, settings)
    assert made.lm is not None
    proposal = made.drafter.propose(tokens, 6)
    for i, id in enumerate(proposal.tokens.tolist()):
        q = expected_q(made.lm, settings, tokens)
        if settings.greedy:
            assert int(q.argmax()) == id
        else:
            assert proposal.probs is not None
            torch.testing.assert_close(proposal.probs[i], q)
        tokens = [*tokens, id]


def test_pitfall_09_a_greedy_draft_is_penalised_too() -> None:
    """Without the penalty on its own draft it would propose the same token for ever."""
    lm = TableLM(torch.tensor([0.0, 0.0, 0.0, 4.0, 3.0, 2.0, 0.0, 0.0]).expand(V, V, V))
    drafter = DraftModel(lm, TARGET, Settings(repetition_penalty=2.5), CAPACITY)
    drafter.prefill([0])
    drafter.observe([0, 1])
    assert drafter.propose([0, 1], 4).tokens.tolist() == [3, 4, 5, 3]


def test_pitfall_05_a_greedy_draft_says_that_nothing_was_drawn() -> None:
    made, tokens = started(make_draft_model, GREEDY)
    assert made.drafter.propose(tokens, 3).probs is None
    sampled, _ = started(make_draft_model, SAMPLED)
    assert sampled.drafter.propose(tokens, 3).probs is not None


def test_its_logits_are_kept_for_display_though_the_next_forward_reuses_its_buffer() -> None:
    class OneBuffer(TableLM):
        """Logits are valid until the next call only, as the contract allows."""

        def open(self, capacity: int) -> Any:
            cache = super().open(capacity)
            extend, buffer = cache.extend, torch.zeros(1, V)
            cache.extend = lambda ids, keep: buffer.copy_(extend(ids, keep))  # type: ignore[method-assign]
            return cache

    for settings in (GREEDY, SAMPLED):
        lm = OneBuffer(random_table(1, V))
        drafter = DraftModel(lm, TARGET, settings, CAPACITY)
        drafter.prefill(PROMPT)
        tokens = [*PROMPT, 2]
        drafter.observe(tokens)
        proposal = drafter.propose(tokens, 4)
        assert proposal.logits is not None
        before = tokens
        for i, id in enumerate(proposal.tokens.tolist()):
            assert torch.equal(proposal.logits[i], lm.table[before[-2], before[-1]])
            if proposal.probs is not None:
                torch.testing.assert_close(proposal.probs[i], expected_q(lm, settings, before))
            before = [*before, id]


@pytest.mark.parametrize("columns", [V - 3, V + 3])
@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_pitfall_10_a_vocabulary_padded_otherwise_drafts_shared_ids_only(columns: int, settings: Settings) -> None:
    size = max(columns, V)
    table = random_table(1, size, columns=columns)
    if columns > V:
        table[..., V:] += 50.0  # padding that would always win
    lm = TableLM(table)
    drafter = DraftModel(lm, TARGET, settings, CAPACITY)
    drafter.prefill(PROMPT)
    tokens = [*PROMPT, 2]
    drafter.observe(tokens)
    proposal = drafter.propose(tokens, 5)
    assert all(id < min(columns, V) for id in proposal.tokens.tolist())
    if proposal.probs is not None:
        assert proposal.probs.shape == (5, V)
        assert float(proposal.probs[:, min(columns, V) :].sum()) == 0.0
    events = decode(make_job(TARGET, PROMPT, replace(settings, max_new_tokens=12), LETTERS), "speculative", lm)
    assert fold(events).drafted > 0


def test_pitfall_10_an_id_that_the_draft_model_lacks_costs_a_guess_and_not_the_run() -> None:
    """The target says 7 again and again; the draft model's embedding ends at 4."""
    target, draft = TableLM(chain({2: 7, 7: 2}, V)), TableLM(random_table(1, 5))
    settings = Settings(max_new_tokens=8, draft_length=2)
    events = decode(make_job(target, [1, 2], settings, LETTERS), "speculative", draft)
    assert outcome(events).token_ids == (7, 2, 7, 2, 7, 2, 7, 2)


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED])
def test_a_reduced_vocabulary_drafts_the_targets_ids_and_has_q_0_outside(settings: Settings) -> None:
    made, tokens = started(make_reduced, settings)
    proposal = made.drafter.propose(tokens, 6)
    assert set(proposal.tokens.tolist()) <= set(REDUCED_IDS.tolist())
    assert proposal.vocab_ids is REDUCED_IDS
    if proposal.probs is not None:
        outside = [id for id in range(V) if id not in REDUCED_IDS.tolist()]
        assert float(proposal.probs[:, outside].sum()) == 0.0
        assert bool((proposal.probs[:, REDUCED_IDS] > 0).all())


def test_the_explanation_of_a_reduced_vocabulary_names_the_targets_ids() -> None:
    lm = TableLM(random_table(1, V, columns=4), vocab_ids=REDUCED_IDS)
    settings = Settings(max_new_tokens=8, draft_length=3, temperature=1.0)
    tokens = list(PROMPT)
    events = decode(make_job(TARGET, PROMPT, settings, LETTERS), "speculative", lm)
    tokens.append(outcome(events).token_ids[0])
    drafted, _ = rounds(events)[0]
    for guess in drafted.tokens:
        raw = lm.table[tokens[-2], tokens[-1]].softmax(-1)
        ids = REDUCED_IDS.tolist()
        assert guess.raw_q == pytest.approx(float(raw[ids.index(guess.id)]))
        best = raw.topk(4)
        assert [candidate.id for candidate in guess.top] == [ids[column] for column in best.indices.tolist()]
        tokens.append(guess.id)


def test_block_verification_drafts_each_round_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The uniforms of a discarded draft have been looked at; see `round_salt`."""
    asked: list[tuple[int, int]] = []

    def recorded(seed: int, position: int, purpose: Purpose, salt: int = 0) -> float:
        asked.append((position, salt))
        return uniform(seed, position, purpose, salt)

    monkeypatch.setattr(draft_model, "uniform", recorded)
    for verification, fresh in (("token", False), ("block", True)):
        asked.clear()
        made, tokens = started(make_draft_model, replace(SAMPLED, verification=verification))  # type: ignore[arg-type]
        for committed in (3, 0, 1):
            made.drafter.propose(tokens, 3)
            tokens = [*tokens, committed]
            made.drafter.observe(tokens)
        assert len(asked) == 9
        assert (len(set(asked)) == 9) == fresh


# Prompt lookup


def lookup(tokens: Sequence[int], draft_length: int = 16, **options: int) -> list[int]:
    drafter = PromptLookup(torch.device("cpu"), **options)
    drafter.prefill(tokens)
    return drafter.propose(tokens, draft_length).tokens.tolist()


def latest_match(tokens: Sequence[int], shortest: int) -> tuple[int, int]:
    """Look back for the longest, then the latest, earlier occurrence of how `tokens` ends: the index of the token after
    it, and its length."""
    for size in range(min(LONGEST, len(tokens)), shortest - 1, -1):
        for start in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[start - size : start]) == list(tokens[-size:]):
                return start, size
    return 0, 0


def reference(tokens: Sequence[int], draft_length: int, shortest: int = 1) -> list[int]:
    """The rule in its simplest words, from the beginning of the text each time."""
    right = {size: PRIOR_WEIGHT * PRIOR[size - 1] for size in range(1, LONGEST + 1)}
    copied = dict.fromkeys(right, PRIOR_WEIGHT)
    for index in range(1, len(tokens)):
        start, size = latest_match(tokens[:index], shortest)
        if size:
            right[size] += tokens[start] == tokens[index]
            copied[size] += 1
    start, size = latest_match(tokens, shortest)
    drafted: list[int] = []
    chance = 1.0
    while size and len(drafted) < draft_length:
        matched = min(size + len(drafted), LONGEST)
        chance *= right[matched] / copied[matched]
        if chance < POSITION_COST:
            break
        drafted.append([*tokens, *drafted][start + len(drafted)])
    return drafted


@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.integers(0, 9), st.integers(1, 4))
@hypothesis_settings(max_examples=60, deadline=None)
def test_lookup_copies_what_followed_the_longest_latest_match(tokens: list[int], k: int, shortest: int) -> None:
    assert lookup(tokens, k, shortest=shortest) == reference(tokens, k, shortest=shortest)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=2, max_size=8), st.booleans())
@hypothesis_settings(max_examples=60, deadline=None)
def test_the_index_grows_round_by_round_to_what_it_is_when_made_at_once(parts: list[list[int]], asked: bool) -> None:
    drafter, tokens = PromptLookup(torch.device("cpu")), list(parts[0])
    drafter.prefill(tokens)
    for part in parts[1:]:
        if asked:
            drafter.propose(tokens, 3)
        tokens = tokens + part
        drafter.observe(tokens)
    assert drafter.propose(tokens, 6).tokens.tolist() == lookup(tokens, 6)


@pytest.mark.parametrize(
    ("tokens", "drafted"),
    [
        ([1, 2, 3, 1, 2], [3, 1, 2, 3]),  # goes on with its own tokens
        ([5, 5, 5], [5, 5, 5, 5]),  # a loop of one
        ([1, 2, 3, 4], []),  # nothing was there before
        ([1], []),
        ([1, 2, 9, 1, 2, 8, 1, 2], [8, 1, 2, 8]),  # the latest of two
        ([7, 1, 2, 9, 4, 1, 2, 8, 7, 1, 2], [9, 4, 1, 2, 8, 7]),  # the longest before the latest
    ],
)
def test_lookup_by_example(tokens: list[int], drafted: list[int]) -> None:
    assert lookup(tokens, len(drafted) or 4) == drafted


def test_a_match_is_trusted_as_far_as_copies_came_true_in_this_text() -> None:
    """Every 1 and every pair is followed by something new, so nothing is drafted after a 1 any more; in a text that
    repeats itself the draft is as long as it may be."""
    new = iter(range(100, 200))
    broken = [token for _ in range(40) for token in (1, next(new))]
    assert lookup([1, 50, 1]) == reference([1, 50, 1], 16) != []
    assert lookup([*broken, 1]) == []
    assert lookup([1, 2, 3, 4] * 5, 16) == [1, 2, 3, 4] * 4


def test_what_would_have_been_right_counts_though_it_was_not_drafted() -> None:
    new = iter(range(100, 300))
    distrusted = [token for _ in range(40) for token in (1, next(new))]
    repeated = [token for _ in range(60) for token in (1, 2, next(new))]  # now 2 follows every time
    assert lookup([*distrusted, 1]) == []
    assert lookup([*distrusted, *repeated, 1])[:1] == [2]


# Hybrid


def test_hybrid_looks_up_where_the_text_matches_and_else_asks_the_model() -> None:
    made = make_hybrid(GREEDY)
    assert made.lm is not None
    made.drafter.prefill(PROMPT)
    tokens = [*PROMPT, 2]
    made.drafter.observe(tokens)
    found = made.drafter.propose(tokens, 3)
    assert (found.origin, found.tokens.tolist(), found.forwards) == ("lookup", [3, 0, 1], 0)
    assert made.lm.forwards == 1  # the prompt
    tokens = [*tokens, 7]
    made.drafter.observe(tokens)
    guessed = made.drafter.propose(tokens, 3)
    assert (guessed.origin, guessed.forwards) == ("model", 3)
    fed = [call for call in made.lm.calls if call.kind == "extend"]
    assert (fed[1].cached, fed[1].count) == (10, 2)  # it catches up on what lookup committed


def test_hybrid_uses_both_in_one_run_and_is_exact() -> None:
    table = random_table(3, V)
    settings = Settings(max_new_tokens=40, draft_length=4)
    target, draft = TableLM(table), TableLM(table + 0.2 * random_table(1, V))
    events = decode(make_job(target, PROMPT, settings, LETTERS), "hybrid", draft)
    assert outcome(events).token_ids == outcome(decode(make_job(target, PROMPT, settings, LETTERS))).token_ids
    assert {drafted.origin for drafted, _ in rounds(events)} >= {"lookup", "model"}
