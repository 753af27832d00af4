"""`judge`, proven by enumeration.

For a small vocabulary everything that can happen is listed: every draft with its probability, every region of the test
uniforms between the thresholds, every interval of the draw. The distribution of what is emitted, continued by the
target, must be the target's own joint distribution. Each mutant of the rule is shown to fail the same comparison.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdemo.acceptance import Verdict, judge, judge_likeliest
from specdemo.errors import ModelUnavailable
from specdemo.sampling import draw, to_probs
from specdemo.settings import Settings, Verification

Judge = Callable[..., Verdict]
Rows = dict[tuple[int, ...], Tensor]
"""A distribution of the next token for every beginning, float64 [V] each."""

BOTH = pytest.mark.parametrize("verification", ["token", "block"])
BELOW_ONE = 1.0 - 2.0**-52


@dataclass(frozen=True)
class Game:
    """A target and a drafter as trees of conditional distributions, K tokens deep. `q` None: `greedy` drafts."""

    k: int
    vocab: int
    p: Rows
    q: Rows | None
    greedy: dict[tuple[int, ...], int] | None = None

    def drafts(self) -> list[tuple[tuple[int, ...], float]]:
        """Every draft that can happen and its probability."""
        if self.greedy is not None:
            ids: tuple[int, ...] = ()
            for _ in range(self.k):
                ids += (self.greedy[ids],)
            return [(ids, 1.0)]
        assert self.q is not None
        drafts = []
        for ids in itertools.product(range(self.vocab), repeat=self.k):
            probability = math.prod(float(self.q[ids[:i]][ids[i]]) for i in range(self.k))
            if probability > 0:
                drafts.append((ids, probability))
        return drafts

    def p_rows(self, ids: tuple[int, ...]) -> Tensor:
        return torch.stack([self.p[ids[:i]] for i in range(self.k + 1)])

    def q_rows(self, ids: tuple[int, ...]) -> Tensor | None:
        return None if self.q is None or self.k == 0 else torch.stack([self.q[ids[:i]] for i in range(self.k)])

    def joint(self) -> dict[tuple[int, ...], float]:
        """The target's own distribution of K + 1 tokens."""
        every = itertools.product(range(self.vocab), repeat=self.k + 1)
        return {ids: self.continued((), ids) for ids in every}

    def continued(self, beginning: tuple[int, ...], ids: tuple[int, ...]) -> float:
        """The target's probability of `ids` given that they begin with `beginning`."""
        if ids[: len(beginning)] != beginning:
            return 0.0
        return math.prod(float(self.p[ids[:i]][ids[i]]) for i in range(len(beginning), len(ids)))


def make_game(seed: int, k: int, vocab: int, kind: str) -> Game:
    """`kind`: soft (all probabilities positive), zeros (some are 0, in p or q or both), equal (p = q), greedy."""
    generator = torch.Generator().manual_seed(seed)

    def row() -> Tensor:
        weights = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2 + 0.01
        if kind == "zeros":
            keep = torch.rand(vocab, generator=generator) < 0.6
            keep[int(torch.randint(vocab, (1,), generator=generator))] = True
            weights = weights * keep
        return weights / weights.sum()

    beginnings = [ids for n in range(k + 1) for ids in itertools.product(range(vocab), repeat=n)]
    p = {ids: row() for ids in beginnings}
    if kind == "greedy":
        greedy = {ids: int(torch.randint(vocab, (1,), generator=generator)) for ids in beginnings}
        return Game(k, vocab, p, None, greedy)
    return Game(k, vocab, p, p if kind == "equal" else {ids: row() for ids in beginnings})


def emitted_joint(
    game: Game, verification: Verification = "token", judge: Judge = judge
) -> tuple[dict[tuple[int, ...], float], float]:
    """The exact distribution of K + 1 tokens when `judge` decides the beginning and the target the rest; and the
    expected number of accepted tokens."""
    total: dict[tuple[int, ...], float] = dict.fromkeys(game.joint(), 0.0)
    expected_accepted = 0.0
    k = game.k
    for ids, probability in game.drafts():
        draft, p_rows, q_rows = torch.tensor(ids, dtype=torch.long), game.p_rows(ids), game.q_rows(ids)

        def verdict(
            tests: Sequence[float], u: float, draft: Tensor = draft, p: Tensor = p_rows, q: Tensor | None = q_rows
        ) -> Verdict:
            return judge(draft, q, p, tests, [u] * (k + 1), verification)

        thresholds = verdict([0.0] * k, 0.0).acceptance
        weight_of: dict[int, float] = {}
        tests_of: dict[int, list[float]] = {}
        for below in itertools.product([True, False], repeat=k):
            regions = [(0.0, a) if yes else (a, 1.0) for a, yes in zip(thresholds, below, strict=True)]
            weight = math.prod(high - low for low, high in regions)
            if weight <= 0.0:
                continue
            lowest = [low for low, _ in regions]
            highest = [math.nextafter(high, 0.0) for _, high in regions]
            # a threshold is where the verdict says it is, and the test is `<`: both corners agree
            n = verdict(lowest, 0.0).num_accepted
            assert verdict(highest, 0.0).num_accepted == n
            weight_of[n] = weight_of.get(n, 0.0) + weight
            tests_of[n] = highest
        assert math.isclose(sum(weight_of.values()), 1.0)

        for n, weight in weight_of.items():
            expected_accepted += probability * weight * n
            cuts = breakpoints(game, ids, n, q_rows)
            for low, high in itertools.pairwise(cuts):
                if high - low < 1e-13:
                    continue
                found = verdict(tests_of[n], (low + high) / 2)
                emitted = (*found.tokens[:n], found.extra)
                for whole in total:
                    total[whole] += probability * weight * (high - low) * game.continued(emitted, whole)
    return total, expected_accepted


def breakpoints(game: Game, ids: tuple[int, ...], n: int, q_rows: Tensor | None) -> list[float]:
    """Where the draw may change its mind: the cumulative sums of every distribution that a rule, right or wrong, could
    draw the extra token from. If the true ones are missing, the sums come out wrong and the comparison fails."""
    p = game.p[ids[:n]]
    candidates = [p]
    if n < game.k:
        q = one_hot(ids[n], game.vocab) if q_rows is None else q_rows[n]
        mass = 1.0
        for i in range(n):
            mass = min(
                1.0, mass * float(game.p[ids[:i]][ids[i]]) / (1.0 if q_rows is None else float(q_rows[i, ids[i]]))
            )
        candidates += [(p - q).clamp(min=0), (mass * p - q).clamp(min=0), (p - mass * q).clamp(min=0)]
    cuts = {0.0, 1.0}
    for weights in candidates:
        if weights.sum() > 0:
            cuts.update((weights.cumsum(0) / weights.sum()).clamp(max=1.0).tolist())
    return sorted(cuts)


def one_hot(id: int, vocab: int) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor(id), vocab).double()


def distance(a: dict[tuple[int, ...], float], b: dict[tuple[int, ...], float]) -> float:
    return max(abs(a[ids] - b[ids]) for ids in b)


# The proof


@BOTH
@pytest.mark.parametrize("kind", ["soft", "zeros", "greedy", "equal"])
@pytest.mark.parametrize(("k", "vocab"), [(0, 3), (1, 4), (2, 3), (2, 4), (3, 3)])
def test_the_target_distribution_is_emitted_exactly(verification: Verification, kind: str, k: int, vocab: int) -> None:
    for seed in range(1 if (k, vocab) == (3, 3) else 2):
        game = make_game(seed, k, vocab, kind)
        emitted, _ = emitted_joint(game, verification)
        assert math.isclose(sum(emitted.values()), 1.0)
        assert distance(emitted, game.joint()) < 1e-12


def test_block_verification_accepts_more_than_token_wise_on_the_papers_example() -> None:
    """Sun et al. 2024, section 2: p = (1/3, 2/3), q = (2/3, 1/3) at every position, K = 2: 10/9 against 11/9."""
    p, q = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64), torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    beginnings = [ids for n in range(3) for ids in itertools.product(range(2), repeat=n)]
    game = Game(2, 2, dict.fromkeys(beginnings, p), dict.fromkeys(beginnings, q))
    assert math.isclose(emitted_joint(game, "token")[1], 10 / 9)
    assert math.isclose(emitted_joint(game, "block")[1], 11 / 9)


@pytest.mark.parametrize("kind", ["soft", "zeros"])
def test_block_verification_never_accepts_less(kind: str) -> None:
    gains = []
    for seed in (1, 2):
        game = make_game(seed, 2, 3, kind)
        gains.append(emitted_joint(game, "block")[1] - emitted_joint(game, "token")[1])
    assert min(gains) > -1e-12
    assert max(gains) > 1e-3


# Mutants: each breaks the rule in one way, and the comparison above must see it


def accept_always(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    k = len(draft)
    verdict = judge(draft, q, p, tests, draws, verification)
    return replace(verdict, num_accepted=k, extra=int(draw(p[k], draws[k])))


def resample_from_p(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    verdict = judge(draft, q, p, tests, draws, verification)
    n = verdict.num_accepted
    return replace(verdict, extra=int(draw(p[n], draws[n])))


def keep_after_rejection(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """A once published fault: every token that passes its test stays, also behind a refused one."""
    verdict = judge(draft, q, p, tests, draws, verification)
    passed = [u < a for u, a in zip(tests, verdict.acceptance, strict=True)]
    kept = [id for id, yes in zip(verdict.tokens, passed, strict=True) if yes]
    return replace(verdict, tokens=(*kept, *[0] * (len(passed) - len(kept))), num_accepted=len(kept))


def flattened_q(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """The q before the drafter's own temperature."""
    soft = q**0.5
    return judge(draft, soft / soft.sum(-1, keepdim=True), p, tests, draws, verification)


def bonus_from_the_last_row(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """No row for the bonus: it is drawn where the last drafted token was judged."""
    verdict = judge(draft, q, p, tests, draws, verification)
    k = len(draft)
    return replace(verdict, extra=int(draw(p[k - 1], draws[k]))) if verdict.num_accepted == k else verdict


def residual_of_the_wrong_sign(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    verdict = judge(draft, q, p, tests, draws, verification)
    n = verdict.num_accepted
    weights = (p[n] - q[n]).abs() if n < len(draft) else p[n]
    return replace(verdict, extra=int(draw(weights, draws[n])))


def token_residual(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """Block verification that forgets the mass: the residual is max(0, p - q)."""
    verdict = judge(draft, q, p, tests, draws, verification)
    n = verdict.num_accepted
    weights = (p[n] - q[n]).clamp(min=0) if n < len(draft) else p[n]
    return replace(verdict, extra=int(draw(weights, draws[n])))


def first_failure_stops(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """Block verification that keeps the longest run of passes instead of the largest i that passes."""
    verdict = judge(draft, q, p, tests, draws, verification)
    n = 0
    while n < len(draft) and tests[n] < verdict.acceptance[n]:
        n += 1
    if n == verdict.num_accepted:
        return verdict
    return judge(draft, q, p, [0.0] * n + [BELOW_ONE] * (len(draft) - n), draws, verification)


@BOTH
@pytest.mark.parametrize(
    "mutant",
    [
        accept_always,
        resample_from_p,
        keep_after_rejection,
        flattened_q,
        bonus_from_the_last_row,
        residual_of_the_wrong_sign,
    ],
)
def test_pitfall_08_a_mutant_of_the_rule_emits_another_distribution(verification: Verification, mutant: Judge) -> None:
    game = make_game(0, 2, 3, "soft")
    emitted, _ = emitted_joint(game, verification, mutant)
    assert distance(emitted, game.joint()) > 1e-3


@pytest.mark.parametrize("mutant", [token_residual, first_failure_stops])
def test_a_mutant_of_block_verification_emits_another_distribution(mutant: Judge) -> None:
    game = make_game(0, 2, 3, "soft")
    emitted, _ = emitted_joint(game, "block", mutant)
    assert distance(emitted, game.joint()) > 1e-3


@BOTH
def test_pitfall_05_a_greedy_draft_judged_with_a_soft_q_emits_another_distribution(verification: Verification) -> None:
    game = make_game(3, 2, 3, "greedy")
    soft = make_game(4, 2, 3, "soft").q

    def soft_judge(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
        assert soft is not None
        ids = tuple(draft.tolist())
        return judge(draft, torch.stack([soft[ids[:i]] for i in range(2)]), p, tests, draws, verification)

    assert distance(emitted_joint(game, verification)[0], game.joint()) < 1e-12
    assert distance(emitted_joint(game, verification, soft_judge)[0], game.joint()) > 1e-2


@BOTH
def test_pitfall_05_q_before_top_k_and_p_after_emits_another_distribution(verification: Verification) -> None:
    """Drawn after top-k = 2, reported before it."""
    full = make_game(5, 2, 3, "soft")
    assert full.q is not None

    def cut(row: Tensor) -> Tensor:
        kept = torch.where(row >= row.topk(2).values[-1], row, 0.0)
        return kept / kept.sum()

    game = Game(2, 3, full.p, {ids: cut(row) for ids, row in full.q.items()})

    def uncut_judge(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
        return judge(draft, full.q_rows(tuple(draft.tolist())), p, tests, draws, verification)

    assert distance(emitted_joint(game, verification)[0], game.joint()) < 1e-12
    assert distance(emitted_joint(game, verification, uncut_judge)[0], game.joint()) > 1e-2


# One verdict at a time


def rows(*values: Sequence[float]) -> Tensor:
    return torch.tensor(values)


@BOTH
def test_a_uniform_at_the_threshold_rejects_and_just_below_accepts(verification: Verification) -> None:
    p, q = rows([0.25, 0.75], [0.5, 0.5]), rows([0.5, 0.5])
    draft = torch.tensor([0])
    below = math.nextafter(0.5, 0.0)
    assert judge(draft, q, p, [0.5], [0.0, 0.0], verification).num_accepted == 0
    assert judge(draft, q, p, [below], [0.0, 0.0], verification).num_accepted == 1


@BOTH
@pytest.mark.parametrize("soft", [True, False])
def test_a_token_that_the_target_cannot_emit_is_rejected_even_at_u_0(verification: Verification, soft: bool) -> None:
    q = rows([0.9, 0.1]) if soft else None
    verdict = judge(torch.tensor([0]), q, rows([0.0, 1.0], [1.0, 0.0]), [0.0], [0.0, 0.0], verification)
    assert (verdict.num_accepted, verdict.extra, verdict.extra_kind) == (0, 1, "recovered")


@BOTH
def test_pitfall_06_p_equal_to_q_draws_from_p_without_nan(verification: Verification) -> None:
    """Rejected at u near 1 by rounding alone, the residual is all zeros: then p itself is drawn from."""
    row = [0.25, 0.0, 0.75]
    for u, extra in ((0.0, 0), (0.24, 0), (0.26, 2), (BELOW_ONE, 2)):
        above_one = [2.0]  # no uniform reaches it: forces the rejection that rounding can cause
        verdict = judge(torch.tensor([2]), rows(row), rows(row, row), above_one, [u, u], verification)
        assert (verdict.num_accepted, verdict.extra, verdict.extra_kind) == (0, extra, "recovered")
        assert verdict.extra_p == row[extra]
        assert verdict.acceptance == (1.0,)


def test_pitfall_06_equal_distributions_accept_everything_token_wise() -> None:
    game = make_game(0, 3, 3, "equal")
    for ids, _ in game.drafts():
        tests = [BELOW_ONE] * 3
        verdict = judge(torch.tensor(ids), game.q_rows(ids), game.p_rows(ids), tests, [0.5] * 4)
        assert verdict.num_accepted == 3
        assert verdict.extra_kind == "bonus"


@BOTH
def test_equal_distributions_accept_everything_in_expectation(verification: Verification) -> None:
    assert math.isclose(emitted_joint(make_game(0, 2, 3, "equal"), verification)[1], 2.0)


def test_nothing_is_looked_at_behind_the_first_rejection() -> None:
    """Token-wise: the tests of later tokens, and the draws of other positions, change nothing."""
    game = make_game(1, 3, 3, "soft")
    ids = (0, 0, 2)
    p, q, draft = game.p_rows(ids), game.q_rows(ids), torch.tensor(ids)
    a = judge(draft, q, p, [0.0, BELOW_ONE, 0.0], [0.9, 0.3, 0.9, 0.9])
    b = judge(draft, q, p, [0.0, BELOW_ONE, BELOW_ONE], [0.1, 0.3, 0.1, 0.1])
    assert a.num_accepted == b.num_accepted == 1
    assert (a.extra, a.extra_p) == (b.extra, b.extra_p)


def test_block_verification_may_keep_a_token_that_its_own_test_refused() -> None:
    game = make_game(0, 2, 3, "equal")
    ids = (0, 1)
    verdict = judge(torch.tensor(ids), game.q_rows(ids), game.p_rows(ids), [BELOW_ONE, 0.0], [0.5] * 3, "block")
    assert verdict.tests[0] >= verdict.acceptance[0]
    assert verdict.num_accepted == 2


@BOTH
@pytest.mark.parametrize("k", [1, 2, 3])
def test_one_hot_by_none_is_one_hot_by_rows(verification: Verification, k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    for _ in range(20):
        p = torch.rand(k + 1, 4, generator=generator).softmax(-1)
        draft = torch.randint(4, (k,), generator=generator)
        tests, draws = (torch.rand(n, generator=generator).tolist() for n in (k, k + 1))
        spelled = torch.nn.functional.one_hot(draft, 4).float()
        assert judge(draft, None, p, tests, draws, verification) == judge(draft, spelled, p, tests, draws, verification)


@BOTH
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_at_temperature_0_the_verdict_is_that_of_the_rule_without_its_arithmetic(
    verification: Verification, k: int
) -> None:
    generator = torch.Generator().manual_seed(k)
    for vocab in (3, 1000):
        for round in range(40):
            scores = torch.randn(k + 1, vocab, generator=generator).round()  # ties, of which the first counts
            right = torch.rand(k, generator=generator) < 0.7
            draft = torch.where(right, scores[:k].argmax(-1), torch.randint(vocab, (k,), generator=generator))
            if round % 3 == 0:
                draft[:] = draft[:1]  # the same id several times
            tests, draws = (torch.rand(n, generator=generator).tolist() for n in (k, k + 1))
            spelled = judge(draft, None, to_probs(scores, Settings(), ()), tests, draws, verification)
            assert judge_likeliest(draft, scores, tests, verification) == spelled
    with pytest.raises(ModelUnavailable, match="NaN"):
        judge_likeliest(draft, scores.fill_(math.nan), tests, verification)


def test_the_verdict_tells_what_was_compared() -> None:
    p, q = rows([0.2, 0.8], [0.5, 0.5], [1.0, 0.0]), rows([0.4, 0.6], [0.25, 0.75])
    verdict = judge(torch.tensor([0, 1]), q, p, [0.4, 0.6], [0.0, 0.0, 0.3])
    assert verdict.num_accepted == 2
    assert verdict.tokens == (0, 1)
    assert verdict.p == pytest.approx((0.2, 0.5))
    assert verdict.q == pytest.approx((0.4, 0.75))
    assert verdict.acceptance == pytest.approx((0.5, 2 / 3))
    assert verdict.tests == (0.4, 0.6)
    assert (verdict.extra, verdict.extra_kind, verdict.extra_p) == (0, "bonus", 1.0)


@pytest.mark.parametrize(("tests", "draws", "p_rows"), [(1, 3, 3), (2, 2, 3), (2, 3, 2)])
def test_pitfall_08_a_missing_row_or_uniform_is_refused(tests: int, draws: int, p_rows: int) -> None:
    with pytest.raises(ValueError, match="2 drafted tokens need 2 tests"):
        judge(torch.tensor([0, 1]), None, torch.full((p_rows, 2), 0.5), [0.5] * tests, [0.5] * draws)


# Properties


uniforms = st.one_of(st.sampled_from([0.0, BELOW_ONE]), st.integers(0, 2**52 - 1).map(lambda i: i * 2.0**-52))


@st.composite
def rounds(draw_: st.DrawFn) -> tuple[Tensor, Tensor | None, Tensor, list[float], list[float], Verification]:
    """A round as an engine makes it: float32 rows with many zeros, a draft that q could have drawn."""
    k, vocab = draw_(st.integers(0, 4)), draw_(st.integers(2, 5))
    weight = st.sampled_from([0.0, 0.0, 1e-30, 1e-6, 0.3, 1.0])
    row = st.lists(weight, min_size=vocab, max_size=vocab).filter(any)
    p = torch.tensor(draw_(st.lists(row, min_size=k + 1, max_size=k + 1)))
    q_or_none = draw_(st.one_of(st.none(), st.lists(row, min_size=k, max_size=k)))
    if q_or_none is None or k == 0:
        q = None
        draft = torch.tensor([draw_(st.integers(0, vocab - 1)) for _ in range(k)], dtype=torch.long)
    else:
        q = torch.tensor(q_or_none)
        if draw_(st.booleans()):
            q = p[:k].clone()  # the drafter is the target
        q = q / q.sum(-1, keepdim=True)
        ids = [draw_(st.sampled_from(q[i].nonzero().flatten().tolist())) for i in range(k)]
        draft = torch.tensor(ids, dtype=torch.long)
    tests = draw_(st.lists(uniforms, min_size=k, max_size=k))
    draws = draw_(st.lists(uniforms, min_size=k + 1, max_size=k + 1))
    verification: Verification = draw_(st.sampled_from(("token", "block")))
    return draft, q, p / p.sum(-1, keepdim=True), tests, draws, verification


@given(rounds())
@settings(max_examples=100, deadline=None)
def test_pitfall_06_nothing_impossible_is_emitted_and_nothing_is_nan(
    a_round: tuple[Tensor, Tensor | None, Tensor, list[float], list[float], Verification],
) -> None:
    draft, _, p, *_ = a_round
    verdict = judge(*a_round)
    n = verdict.num_accepted
    assert 0 <= n <= len(draft)
    assert all(p[i, draft[i]] > 0 for i in range(n))
    assert p[n, verdict.extra] > 0
    assert verdict.extra_p == float(p[n, verdict.extra])
    assert (verdict.extra_kind == "bonus") == (n == len(draft))
    assert all(0.0 <= a <= 1.0 for a in verdict.acceptance)
