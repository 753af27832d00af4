"""The promise itself: with a draft or without, the same greedy ids and the same distribution of sampled ones.

Greedy: every drafter and draft length against transformers' own `generate` on a seeded random Llama in float32, each
case with its histogram, so that it cannot pass by not speculating. Sampled: whole engines over table models whose exact
distribution is known, by a chi-square with fixed seeds; and mutants, which the same test refuses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tiny import (
    TableLM,
    as_lm,
    byte_level_tokenizer,
    chi_square_p,
    decode,
    joint,
    letters,
    make_job,
    outcome,
    random_table,
    rounds,
    timeless,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from specdemo import acceptance
from specdemo.acceptance import Verdict
from specdemo.drafters import draft_model
from specdemo.engines import job as engine_job
from specdemo.errors import ModelUnavailable
from specdemo.events import Event, Verified
from specdemo.metrics import first_divergence, fold
from specdemo.models.transformers_lm import TransformersLM
from specdemo.sampling import draw
from specdemo.settings import Settings
from specdemo.text import TokenText

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

TEXT = TokenText(byte_level_tokenizer((chr(0x100 + id) for id in range(3, 96)), special=["<pad>", "<s>", "</s>"]))
PROMPT = [1, *[10, 20, 30, 40, 50, 60] * 2, 10, 20]
LENGTH = 24


def generated(model: Any, prompt: list[int], **options: Any) -> tuple[int, ...]:
    """The ids that transformers' greedy `generate` adds."""
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        **{"max_new_tokens": LENGTH, "eos_token_id": None, **options},
    )
    return tuple(ids[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def expected(tiny_target: LlamaForCausalLM) -> tuple[int, ...]:
    return generated(tiny_target, PROMPT)


@pytest.fixture(scope="module")
def lms(tiny_target: LlamaForCausalLM, tiny_draft: LlamaForCausalLM) -> dict[str, TransformersLM]:
    assert tiny_target.dtype == tiny_draft.dtype == torch.float32  # pitfall 13: exact equality is float32's
    return {"target": as_lm(tiny_target), "other": as_lm(tiny_draft), "itself": as_lm(tiny_target)}


def lane(lms: dict[str, TransformersLM], method: str, draft: str, settings: Settings, **more: Any) -> list[Event]:
    job = make_job(lms["target"], PROMPT, settings, TEXT, **more)
    return decode(job, method, None if method == "prompt-lookup" else lms[draft])


# Greedy, against generate


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("k", [0, 1, 2, 5, 16])
@pytest.mark.parametrize(
    ("method", "draft"),
    [("speculative", "other"), ("speculative", "itself"), ("prompt-lookup", ""), ("hybrid", "other")],
)
def test_greedy_ids_are_those_of_generate(
    lms: dict[str, TransformersLM], expected: tuple[int, ...], method: str, draft: str, k: int, verification: Any
) -> None:
    settings = Settings(max_new_tokens=LENGTH, draft_length=k, verification=verification)
    events = lane(lms, method, draft, settings)
    assert outcome(events).token_ids == expected
    metrics = fold(events)
    lengths = [len(drafted.tokens) for drafted, _ in rounds(events)]
    if k == 0:
        assert metrics.accepted_histogram == (LENGTH - 1,)
        assert metrics.drafted == 0
    elif draft == "itself":
        full, rest = divmod(LENGTH - 1, k + 1)
        assert lengths == [k] * full + [rest - 1] * bool(rest)
        assert sum(metrics.accepted_histogram) == full + bool(rest)
        assert metrics.accepted_histogram[k] >= full
        assert metrics.acceptance_rate == 1.0
    else:
        assert min(k, 2) <= max(lengths) <= k
        assert len(metrics.accepted_histogram) > 1, "nothing was accepted"
        assert metrics.accepted < metrics.drafted, "nothing was rejected"
        assert metrics.rounds < LENGTH - 1


def test_standard_ids_are_those_of_generate(lms: dict[str, TransformersLM], expected: tuple[int, ...]) -> None:
    events = decode(make_job(lms["target"], PROMPT, Settings(max_new_tokens=LENGTH), TEXT))
    assert outcome(events).token_ids == expected
    assert len(set(expected)) > 10  # not a loop that anything would find


@pytest.mark.parametrize("method", ["standard", "speculative", "prompt-lookup", "hybrid"])
def test_pitfall_09_a_penalised_greedy_text_is_that_of_generate(
    tiny_target: LlamaForCausalLM, lms: dict[str, TransformersLM], method: str
) -> None:
    wanted = generated(tiny_target, PROMPT, repetition_penalty=1.3)
    assert wanted != generated(tiny_target, PROMPT)
    settings = Settings(max_new_tokens=LENGTH, draft_length=5, repetition_penalty=1.3)
    job = make_job(lms["target"], PROMPT, settings, TEXT)
    events = decode(job, method, lms["other"])
    assert outcome(events).token_ids == wanted
    assert method in ("standard", "prompt-lookup") or fold(events).accepted > 0


@pytest.mark.parametrize("method", ["standard", "speculative", "prompt-lookup", "hybrid"])
@pytest.mark.parametrize("position", [0, 1, 7, 18])
def test_pitfall_01_every_eos_id_ends_where_generate_ends(
    tiny_target: LlamaForCausalLM,
    lms: dict[str, TransformersLM],
    expected: tuple[int, ...],
    method: str,
    position: int,
) -> None:
    eos = [2, 95, expected[position]]
    wanted = generated(tiny_target, PROMPT, eos_token_id=eos, pad_token_id=0)
    assert len(wanted) <= position + 1
    settings = Settings(max_new_tokens=LENGTH, draft_length=5)
    events = decode(make_job(lms["target"], PROMPT, settings, TEXT, eos_ids=frozenset(eos)), method, lms["other"])
    assert (outcome(events).token_ids, outcome(events).finish_reason) == (wanted, "eos")
    assert fold(events).tokens == len(wanted)


def test_pitfall_10_padding_ids_are_never_produced(tiny_target: LlamaForCausalLM, expected: tuple[int, ...]) -> None:
    """The model has 96 columns, the tokenizer 64 ids: the text is that of the model without the rest."""
    assert max(expected) >= 64
    target = as_lm(tiny_target, vocab_size=64)
    suppressed = generated(tiny_target, PROMPT, suppress_tokens=list(range(64, 96)))
    for method, draft in (("standard", None), ("speculative", as_lm(tiny_target)), ("prompt-lookup", None)):
        events = decode(make_job(target, PROMPT, Settings(max_new_tokens=LENGTH), TEXT), method, draft)
        assert outcome(events).token_ids == suppressed
    sampled = Settings(max_new_tokens=LENGTH, temperature=5.0)
    events = decode(make_job(target, PROMPT, sampled, TEXT), "speculative", as_lm(tiny_target))
    assert max(outcome(events).token_ids) < 64


# Other architectures, through transformers' forward

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
WINDOW = 8
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": 96,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": 0.2,
    },
    "mistral": {**SMALL, "sliding_window": WINDOW},
    "gemma2": {**SMALL, "sliding_window": WINDOW, "head_dim": 8},
}


def build(architecture: str, **options: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(architecture, **options)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_pitfall_11_a_sliding_window_crossed_during_a_run_stays_exact(architecture: str) -> None:
    """The prompt is longer than the window, and the output crosses it several times, with rejections on the way."""
    model = build(architecture, **ARCHITECTURES[architecture])
    target = as_lm(model, context_length=128)
    wanted = generated(model, PROMPT)
    disturbed = build(architecture, **ARCHITECTURES[architecture])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        for weight in disturbed.parameters():
            weight.add_(0.02 * torch.randn_like(weight))
    draft = as_lm(disturbed, context_length=128)
    for method in ("standard", "speculative", "hybrid"):
        job = make_job(target, PROMPT, Settings(max_new_tokens=LENGTH, draft_length=5), TEXT)
        events = decode(job, method, draft)
        assert outcome(events).token_ids == wanted
    assert 0 < fold(events).accepted < fold(events).drafted
    assert len(PROMPT) > WINDOW


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("mamba", {"state_size": 4}),
        ("recurrent_gemma", {"lru_width": 32, "attention_window_size": 8}),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}),
        ("openai-gpt", {"n_embd": 32, "n_head": 4, "n_positions": 64}),
    ],
)
def test_pitfall_11_a_cache_that_cannot_be_rolled_back_is_refused_up_front(
    architecture: str, options: dict[str, Any]
) -> None:
    model = build(architecture, **{**SMALL, **options})
    with pytest.raises(ModelUnavailable, match=r"^tiny cannot run here: it .* Choose a model"):
        as_lm(model, context_length=64)


def test_a_cache_refuses_more_than_its_capacity(lms: dict[str, TransformersLM]) -> None:
    cached = lms["target"].open(4)
    cached.extend(torch.tensor([1, 2, 3]), keep=1)
    with pytest.raises(ValueError, match="3 \\+ 2 positions"):
        cached.extend(torch.tensor([4, 5]), keep=1)
    cached.truncate(7)
    assert cached.cached == 3
    cached.close()
    cached.close()
    assert cached.cached == 0


@pytest.mark.parametrize("keep", [1, 3])
def test_rolled_back_positions_leave_no_trace(lms: dict[str, TransformersLM], keep: int) -> None:
    rolled, straight = lms["target"].open(16), lms["target"].open(16)
    rolled.extend(torch.tensor([1, 10, 20]), keep=1)
    rolled.extend(torch.tensor([33, 44, 55, 66]), keep=4)
    rolled.truncate(4)
    straight.extend(torch.tensor([1, 10, 20, 33]), keep=1)
    tail = torch.tensor([7, 8, 9])
    a, b = rolled.extend(tail, keep), straight.extend(tail, keep)
    assert a.shape == (keep, 96)
    assert a.dtype == torch.float32
    torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


# A draft model that is the target


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_pitfall_07_a_draft_equal_to_the_target_is_accepted_whole(
    lms: dict[str, TransformersLM], k: int, temperature: float
) -> None:
    for seed in range(3):
        settings = Settings(max_new_tokens=LENGTH, draft_length=k, temperature=temperature, seed=seed)
        metrics = fold(lane(lms, "speculative", "itself", settings))
        assert (metrics.alpha, metrics.acceptance_rate) == (1.0, 1.0)
        assert metrics.drafted == metrics.accepted > LENGTH // 2 - 2


def test_a_draft_equal_to_the_target_is_accepted_whole_by_block_verification(lms: dict[str, TransformersLM]) -> None:
    settings = Settings(max_new_tokens=LENGTH, draft_length=4, temperature=1.0, verification="block")
    metrics = fold(lane(lms, "speculative", "itself", settings))
    assert (metrics.alpha, metrics.acceptance_rate) == (None, 1.0)


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
@pytest.mark.parametrize("verification", ["token", "block"])
def test_k_0_is_standard_decoding_at_any_temperature(
    lms: dict[str, TransformersLM], temperature: float, verification: Any
) -> None:
    settings = Settings(
        max_new_tokens=20, temperature=temperature, top_p=0.9, seed=11, draft_length=0, verification=verification
    )
    plain = outcome(decode(make_job(lms["target"], PROMPT, settings, TEXT)))
    for method in ("speculative", "prompt-lookup", "hybrid"):
        assert outcome(lane(lms, method, "other", settings)).token_ids == plain.token_ids
    elsewhere = outcome(decode(make_job(lms["target"], PROMPT, replace(settings, seed=12), TEXT)))
    assert (elsewhere.token_ids == plain.token_ids) == (temperature == 0.0)


# Half precision


def test_pitfall_13_where_rounding_parts_two_texts_the_page_can_tell_it_from_a_bug() -> None:
    """A forward of several positions rounds otherwise than one of one: the texts part at a near tie. The events hold
    where, and how near: both tokens among the likeliest, with almost the same probability."""
    table = random_table(0, 6, scale=3.0)
    table[3, 4, 2] = table[3, 4].max() + 1.0
    table[3, 4, 5] = table[3, 4, 2] - 1e-3

    class Rounding(TableLM):
        def open(self, capacity: int) -> Any:
            cached = super().open(capacity)
            extend = cached.extend

            def rounded(ids: Tensor, keep: int) -> Tensor:
                logits = extend(ids, keep)
                return logits if keep == 1 else logits.to(torch.bfloat16).float() + 1e-3 * (torch.arange(6) == 5)

            cached.extend = rounded  # type: ignore[method-assign]
            return cached

    table[0, 1, 3] = table[1, 3, 4] = 20.0
    table[4, 2, 2] = table[4, 5, 5] = table[2, 2, 2] = table[5, 5, 5] = 20.0
    settings = Settings(max_new_tokens=6, draft_length=3)
    target, draft = Rounding(table), TableLM(table)
    plain = decode(make_job(target, [0, 1], settings, letters(6)))
    fast = decode(make_job(target, [0, 1], settings, letters(6)), "speculative", draft)
    at = first_divergence(outcome(plain).token_ids, outcome(fast).token_ids)
    assert at == 2
    ours, theirs = outcome(plain).token_ids[at], outcome(fast).token_ids[at]
    assert {ours, theirs} == {2, 5}
    raw = {candidate.id: candidate.prob for candidate in rounds(plain)[at - 1][1].extra.top}  # type: ignore[union-attr]
    assert abs(raw[ours] - raw[theirs]) < 0.01
    assert min(raw[ours], raw[theirs]) > 0.3


# Sampled: the distribution of whole engines

VOCAB = 3
SHORT_PROMPT = [0, 1, 2, 0, 1, 0, 0, 1, 1, 0, 1]  # whatever comes first, lookup finds it behind 0 1
TOKENS = 5
JUDGED = slice(1, 4)  # the tokens that are compared: those of the first round's draft
RUNS = 200
ENOUGH = 1e-3  # with fixed seeds this is no chance: a test that passes once passes always
NEVER = 1e-6


TARGET_TABLE = torch.tensor([0.4, 0.3, 0.3]).log() + random_table(0, VOCAB, scale=0.3)
DRAFT_TABLE = torch.tensor([0.1, 0.05, 0.85]).log() + random_table(1, VOCAB, scale=0.3)


def sampled_p(
    method: str,
    verification: Any,
    target_table: Tensor = TARGET_TABLE,
    draft_table: Tensor = DRAFT_TABLE,
    prompt: Sequence[int] = SHORT_PROMPT,
    vocab_ids: Tensor | None = None,
    runs: int = RUNS,
    **options: Any,
) -> float:
    """The chi-square p-value of what an engine emits at temperature 1, seed by seed, under the exact distribution of
    the tokens `JUDGED`."""
    target, draft = TableLM(target_table), TableLM(draft_table, vocab_ids=vocab_ids)
    text = letters(target.vocab_size)
    counts: Counter[tuple[int, ...]] = Counter()
    speculated = 0
    for seed in range(runs):
        settings = Settings(
            **{"max_new_tokens": TOKENS, "temperature": 1.0, "draft_length": 3, **options},
            seed=seed,
            verification=verification,
        )
        target.opened.clear()
        draft.opened.clear()
        events = decode(make_job(target, prompt, settings, text, explain=False), method, draft)
        counts[outcome(events).token_ids[JUDGED]] += 1
        speculated += sum(event.num_accepted for event in events if isinstance(event, Verified))
    assert speculated > runs / 4
    expected: dict[tuple[int, ...], float] = defaultdict(float)
    for ids, p in joint(target.table, prompt, JUDGED.stop).items():
        expected[ids[JUDGED]] += p
    return chi_square_p(counts, expected)


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("method", ["speculative", "hybrid", "prompt-lookup"])
def test_sampled_ids_have_the_targets_distribution(method: str, verification: Any) -> None:
    assert sampled_p(method, verification) > ENOUGH


@pytest.mark.parametrize("verification", ["token", "block"])
def test_an_adaptive_draft_length_keeps_the_distribution(verification: Any) -> None:
    """With a draft that is now sure of its next token and now not: rounds of one to three tokens."""
    draft_table = torch.tensor([0.5, 0.2, 0.3]).log() + random_table(2, VOCAB, scale=0.6)
    assert sampled_p("speculative", verification, draft_table=draft_table, adaptive=True) > ENOUGH


@pytest.mark.parametrize("verification", ["token", "block"])
def test_a_reduced_draft_vocabulary_keeps_the_distribution(verification: Any) -> None:
    """The draft model knows two of the three ids: the other can only be recovered, or be a bonus."""
    known = torch.tensor([2, 0])
    assert sampled_p("speculative", verification, draft_table=DRAFT_TABLE[..., known], vocab_ids=known) > ENOUGH


# Mutants, in the place of the real thing inside whole engines

Judge = Callable[..., Verdict]


def accept_always(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    verdict = acceptance.judge(draft, q, p, tests, draws, verification)
    return replace(verdict, num_accepted=len(draft), extra=int(draw(p[-1], draws[-1])), extra_kind="bonus")


def resample_from_p(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    verdict = acceptance.judge(draft, q, p, tests, draws, verification)
    return replace(verdict, extra=int(draw(p[verdict.num_accepted], draws[verdict.num_accepted])))


def always_exact_match(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """Keeps a token where it is the target's likeliest, as greedy verification would."""
    hits = [float(p[i, id] == p[i].max()) for i, id in enumerate(draft.tolist())]
    return acceptance.judge(draft, q, p, [1.0 - hit for hit in hits], draws, verification)


def wrong_q(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    """The q of another temperature than that which was drawn from."""
    flat = None if q is None else (q.log() / 4).softmax(-1)
    return acceptance.judge(draft, flat, p, tests, draws, verification)


def soft_q_for_one_hot(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
    soft = torch.full((len(draft), p.shape[1]), 1.0 / p.shape[1]) if q is None and len(draft) else q
    return acceptance.judge(draft, soft, p, tests, draws, verification)


@pytest.mark.parametrize(
    ("method", "mutant"),
    [
        ("speculative", accept_always),
        ("speculative", resample_from_p),
        ("speculative", always_exact_match),
        ("speculative", wrong_q),
        ("prompt-lookup", accept_always),
        ("prompt-lookup", resample_from_p),
        ("prompt-lookup", soft_q_for_one_hot),
    ],
)
def test_a_mutant_of_the_rule_fails_the_chi_square(method: str, mutant: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_job, "judge", mutant)
    assert sampled_p(method, "token") < NEVER


@pytest.mark.parametrize("method", ["speculative", "prompt-lookup"])
def test_tokens_kept_after_a_rejection_fail_the_chi_square(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_after_rejection(draft: Tensor, q: Any, p: Tensor, tests: Any, draws: Any, verification: Any) -> Verdict:
        verdict = acceptance.judge(draft, q, p, tests, draws, verification)
        passed = [i for i, (u, a) in enumerate(zip(tests, verdict.acceptance, strict=True)) if u < a]
        kept = [verdict.tokens[i] for i in passed]
        return replace(verdict, num_accepted=len(kept), tokens=(*kept, *verdict.tokens[len(kept) :]))

    monkeypatch.setattr(engine_job, "judge", keep_after_rejection)
    assert sampled_p(method, "token") < NEVER


# Uniforms that are used again: two traps, in which what was discarded decides what comes next
#
# After the prompt [1, 2] the target says 2 for certain. Then the draft model says 0 for certain, which the target does
# half the time. A refused block is followed by 1, after which the target tosses a coin between 0 and 1.

COIN = torch.tensor([0.5, 0.5, 0.0])
ZERO, ONE, TWO = torch.eye(3)


def trap(q_after_0: Tensor, p_after_0: Tensor, q_after_1: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (target, draft). What follows the refused 0 makes the verdict on the block a verdict on one uniform."""
    target = COIN.expand(3, 3, 3).clone()
    draft = COIN.expand(3, 3, 3).clone()
    target[1, 2] = draft[1, 2] = TWO
    draft[2, 2], target[2, 2] = ZERO, COIN
    draft[2, 0], target[2, 0] = q_after_0, p_after_0
    draft[2, 1], target[2, 1] = q_after_1, COIN
    return target.log(), draft.log()


DRAFT_TRAP = trap(COIN, ZERO, COIN)
"""The block stays if the coin at the second position falls on 0. If refused, the coin fell on 1: thrown again with the
same uniform, it falls on 1 again, and is accepted."""

TEST_TRAP = trap(ZERO, ZERO, ZERO)
"""The block stays if the second test is below 1/2. If refused, it was above: used again to judge 0 against a coin, it
refuses always."""


@pytest.mark.parametrize("verification", ["token", "block"])
@pytest.mark.parametrize("trap", [DRAFT_TRAP, TEST_TRAP], ids=["draft", "test"])
def test_no_uniform_decides_twice(trap: tuple[Tensor, Tensor], verification: Any) -> None:
    assert sampled_p("speculative", verification, *trap, prompt=[1, 2]) > ENOUGH


@pytest.mark.parametrize(
    ("trap", "module"), [(DRAFT_TRAP, draft_model), (TEST_TRAP, engine_job)], ids=["draft", "test"]
)
def test_block_verification_needs_fresh_uniforms_each_round(
    trap: tuple[Tensor, Tensor], module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "round_salt", lambda settings, index: 0)
    assert sampled_p("speculative", "block", *trap, prompt=[1, 2], runs=120) < NEVER


@pytest.mark.parametrize("trap", [DRAFT_TRAP, TEST_TRAP], ids=["draft", "test"])
def test_token_wise_verification_may_have_fresh_uniforms_too(
    trap: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (draft_model, engine_job):
        monkeypatch.setattr(module, "round_salt", lambda settings, index: index + 1)
    assert sampled_p("speculative", "token", *trap, prompt=[1, 2]) > ENOUGH


def test_methods_that_draft_alike_emit_alike() -> None:
    """Uniforms belong to positions. The draft model is the same in both lanes, until hybrid finds something to copy."""
    target, draft = TableLM(TARGET_TABLE), TableLM(DRAFT_TABLE)
    settings = Settings(max_new_tokens=12, temperature=1.0, draft_length=3, seed=4)
    job = make_job(target, [2, 1], settings, letters(VOCAB))
    pairs = zip(rounds(decode(job, "speculative", draft)), rounds(decode(job, "hybrid", draft)), strict=False)
    alike = 0
    for (drafted, verified), (hybrid_drafted, hybrid_verified) in pairs:
        if hybrid_drafted.origin != drafted.origin:
            break
        assert timeless([drafted, verified]) == timeless([hybrid_drafted, hybrid_verified])
        alike += 1
    assert alike >= 2
