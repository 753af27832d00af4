"""From logits to probabilities as transformers' `generate` does it, and from a counter to uniforms and tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdemo import sampling
from specdemo.acceptance import judge, judge_likeliest
from specdemo.errors import BadRequest, SpecdemoError
from specdemo.sampling import Purpose, draw, likeliest, penalise, round_salt, to_probs, uniform
from specdemo.settings import Settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

BELOW_ONE = 1.0 - 2.0**-52


# to_probs


def transformers_probs(logits: Tensor, settings: Settings, context: list[int]) -> Tensor:
    """One row through transformers' own processors, in the order in which `generate` builds them."""
    chain = LogitsProcessorList()
    if settings.repetition_penalty != 1.0:
        chain.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.temperature != 1.0:
        chain.append(TemperatureLogitsWarper(float(settings.temperature)))
    if settings.top_k:
        chain.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        chain.append(TopPLogitsWarper(float(settings.top_p)))
    if settings.min_p > 0.0:
        chain.append(MinPLogitsWarper(float(settings.min_p)))
    return chain(torch.tensor([context]), logits.clone()[None])[0].softmax(-1)


@st.composite
def filtered(draw_: st.DrawFn) -> tuple[Tensor, Settings, list[int]]:
    vocab = draw_(st.integers(3, 12))
    # whole and half numbers, so that ties are everywhere
    logit = st.integers(-12, 12).map(lambda i: i / 2)
    logits = torch.tensor(draw_(st.lists(logit, min_size=vocab, max_size=vocab)))
    settings = Settings(
        temperature=draw_(st.sampled_from([0.25, 0.7, 1.0, 1.5, 3.0])),
        top_k=draw_(st.sampled_from([0, 1, 2, 3, 5, 50])),
        top_p=draw_(st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0])),
        min_p=draw_(st.sampled_from([0.0, 0.05, 0.3, 1.0])),
        repetition_penalty=draw_(st.sampled_from([0.5, 1.0, 1.2, 2.0])),
    )
    context = draw_(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=6))
    return logits, settings, context


@given(filtered())
@hypothesis_settings(max_examples=80, deadline=None)
def test_filters_and_their_ties_are_those_of_transformers(case: tuple[Tensor, Settings, list[int]]) -> None:
    logits, settings, context = case
    ours, theirs = to_probs(logits[None], settings, context)[0], transformers_probs(logits, settings, context)
    assert torch.equal(ours > 0, theirs > 0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        {"temperature": 2.0, "top_k": 0, "top_p": 0.5, "min_p": 0.0, "repetition_penalty": 1.0},
    ],
)
def test_the_distribution_is_the_one_that_generate_samples_from(
    tiny_target: LlamaForCausalLM, options: dict[str, Any]
) -> None:
    """Whatever order `generate` applies its filters in, and whatever it counts as seen, is ours too."""
    prompt = [1, 7, 8, 9, 7]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        output = tiny_target.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=True,
            max_new_tokens=12,
            eos_token_id=None,
            output_scores=True,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    ids = output.sequences[0].tolist()
    logits = torch.cat(output.logits)
    settings = Settings(**options)
    ours = to_probs(logits, settings, prompt, ids[len(prompt) :])
    torch.testing.assert_close(ours, torch.cat(output.scores).softmax(-1), rtol=1e-5, atol=1e-7)


def test_pitfall_07_temperature_0_is_the_argmax_whatever_the_filters_say() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 1.0]])
    for settings in (Settings(), Settings(top_k=2, top_p=0.5, min_p=0.5)):
        assert to_probs(logits, settings, [0]).tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    penalised = Settings(repetition_penalty=2.0)
    assert to_probs(logits, penalised, [1]).argmax(-1).tolist() == [2, 0]


@pytest.mark.parametrize("vocab", [1000, 6144, 49152])
def test_the_likeliest_is_the_first_of_the_greatest(vocab: int) -> None:
    scores = torch.randn(7, vocab, generator=torch.Generator().manual_seed(0))
    scores[1].clamp_(max=0.5)
    scores[2] = -torch.inf
    scores[3] = scores[3].round()
    scores[4, vocab - 1] = 99.0
    scores[5, 300], scores[5, 700] = torch.nan, torch.inf
    for rows in (scores, scores[:1], scores[:, 1:], scores[:0]):
        assert likeliest(rows).tolist() == rows.argmax(-1).tolist()


def test_pitfall_09_row_i_is_penalised_on_the_prefix_and_the_draft_before_it() -> None:
    """As standard decoding would: not the whole draft, not the last token only, each token once."""
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    context, draft = [0, 0, 3], [5, 1, 5]
    for temperature in (0.0, 1.0):
        settings = Settings(temperature=temperature, repetition_penalty=1.7)
        together = to_probs(logits, settings, context, draft)
        for i in range(4):
            alone = to_probs(logits[i : i + 1], settings, context + draft[:i])
            assert torch.equal(together[i : i + 1], alone)
    rows = penalise(logits, settings, context, draft)
    changed = [(row != logits[i]).nonzero().flatten().tolist() for i, row in enumerate(rows)]
    assert changed == [[0, 3], [0, 3, 5], [0, 1, 3, 5], [0, 1, 3, 5]]


def test_a_penalty_leaves_the_models_logits_as_they_were() -> None:
    logits = torch.tensor([[1.0, -1.0]])
    penalised = penalise(logits, Settings(repetition_penalty=2.0), [0, 0, 1])
    assert penalised.tolist() == [[0.5, -2.0]]
    assert logits.tolist() == [[1.0, -1.0]]
    assert penalise(logits, Settings(), [0]) is logits
    assert penalise(logits, Settings(repetition_penalty=2.0), []).tolist() == [[1.0, -1.0]]
    assert penalise(logits, Settings(repetition_penalty=2.0), [7]).tolist() == [[1.0, -1.0]]


def test_pitfall_10_ids_that_cannot_be_have_probability_0() -> None:
    logits = torch.tensor([[1.0, -torch.inf, 2.0, -torch.inf]])
    for settings in (
        Settings(temperature=1.0),
        Settings(temperature=1.0, top_k=3),
        Settings(temperature=1.0, top_p=0.9999, min_p=1e-6, repetition_penalty=1.5),
    ):
        probs = to_probs(logits, settings, [0, 1])[0]
        assert probs[1] == probs[3] == 0.0
        assert float(probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{"temperature": 1e-6}, {"temperature": 100.0}, {"repetition_penalty": 0.01}])
def test_the_most_extreme_settings_allowed_give_probabilities(options: dict[str, float]) -> None:
    logits = torch.tensor([[6e4, -6e4, 5.99e4, 0.0]])
    probs = to_probs(logits, Settings(**{"temperature": 1.0, **options}), [0, 1])
    assert float(probs.sum()) == pytest.approx(1.0)
    assert int(probs.argmax()) == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [[math.nan, 0.0], [math.nan, math.nan], [math.inf, 0.0]])
def test_logits_that_are_not_numbers_are_an_error_that_says_so(temperature: float, broken: list[float]) -> None:
    """Half precision can overflow: better a sentence than a token picked from nothing."""
    probs = to_probs(torch.tensor([broken]), Settings(temperature=temperature), [0])
    with pytest.raises(SpecdemoError, match="not a number"):
        judge(torch.empty(0, dtype=torch.long), None, probs, [], [0.9])
    if temperature == 0.0:
        with pytest.raises(SpecdemoError, match="not a number"):
            judge_likeliest(torch.empty(0, dtype=torch.long), torch.tensor([broken]), [])


# Settings


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": 1e-30},
        {"temperature": math.nan},
        {"temperature": "1"},
        {"temperature": True},
        {"top_k": -1},
        {"top_k": 1.0},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": math.inf},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-30},
        {"max_new_tokens": 0},
        {"draft_length": 17},
        {"draft_length": -1},
        {"seed": -1},
        {"seed": 2**63},
        {"stop": "abc"},
        {"stop": ("",)},
        {"stop": ("\ud800",)},
        {"adaptive": 1},
        {"ignore_eos": "no"},
        {"verification": "greedy"},
    ],
)
def test_a_setting_out_of_range_is_refused_in_one_sentence(options: dict[str, Any]) -> None:
    with pytest.raises(BadRequest) as refused:
        Settings(**options)
    sentence = str(refused.value)
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_pitfall_05_nothing_is_filtered_by_default() -> None:
    """transformers' generation configs bring a top-k of 50."""
    assert (Settings().top_k, Settings().top_p, Settings().min_p, Settings().repetition_penalty) == (0, 1.0, 0.0, 1.0)
    logits = torch.zeros(1, 100)
    assert int((to_probs(logits, Settings(temperature=1.0), [0]) > 0).sum()) == 100


# Uniforms


def test_uniforms_are_fixed_by_their_arguments_for_ever() -> None:
    """Recorded runs depend on these figures; SplitMix64's own first output for seed 0 is known."""
    assert sampling._mix(0) == 0xE220A8397B1DCDAF
    assert uniform(0, 0, Purpose.TARGET) == uniform(0, 0, Purpose.TARGET, 0)
    figures = [
        uniform(0, 0, Purpose.TARGET),
        uniform(0, 1, Purpose.ACCEPT),
        uniform(2**63 - 1, 5, Purpose.DRAFT),
        uniform(7, 5, Purpose.DRAFT, 3),
    ]
    assert figures == FIGURES


FIGURES = [0.8513026201288321, 0.7707417061366046, 0.39990849296113273, 0.1323889984042499]


def streams() -> dict[str, list[float]]:
    """Uniforms that differ in one argument only."""
    n = range(4000)
    return {
        "position": [uniform(0, i, Purpose.TARGET) for i in n],
        "seed": [uniform(i, 0, Purpose.TARGET) for i in n],
        "salt": [uniform(0, 0, Purpose.TARGET, i) for i in n],
        "draft": [uniform(0, i, Purpose.DRAFT) for i in n],
        "accept": [uniform(0, i, Purpose.ACCEPT) for i in n],
        "next seed": [uniform(1, i, Purpose.TARGET) for i in n],
        "next salt": [uniform(0, i, Purpose.TARGET, 1) for i in n],
        "next position": [uniform(0, i + 1, Purpose.TARGET) for i in n],
    }


def test_uniforms_are_uniform_and_uncorrelated_across_seed_position_purpose_and_salt() -> None:
    names, values = zip(*streams().items(), strict=True)
    table = torch.tensor(values, dtype=torch.float64)
    assert float(table.min()) >= 0.0
    assert float(table.max()) < 1.0
    for row in table:
        counts = torch.histc(row, bins=20, min=0.0, max=1.0)
        assert float(((counts - 200) ** 2 / 200).sum()) < 45  # chi-square, 19 degrees of freedom: p = 0.0007
    correlation = torch.corrcoef(table) - torch.eye(len(names))
    assert float(correlation.abs().max()) < 4 / math.sqrt(table.shape[1])


def test_a_uniform_never_reaches_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "_mix", lambda x: 2**64 - 1)
    assert uniform(0, 0, Purpose.TARGET) == BELOW_ONE
    monkeypatch.setattr(sampling, "_mix", lambda x: 0)
    assert uniform(0, 0, Purpose.TARGET) == 0.0


def test_rounds_share_uniforms_only_where_nothing_depended_on_them() -> None:
    token, block = Settings(), replace(Settings(), verification="block")
    assert {round_salt(token, i) for i in range(9)} == {0}
    assert len({round_salt(block, i) for i in range(9)} | {0}) == 10


# draw


weights = st.lists(st.sampled_from([0.0, 0.0, 1e-38, 1e-7, 0.1, 0.25, 1.0, 3e38]), min_size=1, max_size=8).filter(any)
us = st.one_of(st.sampled_from([0.0, 0.5, BELOW_ONE]), st.integers(0, 2**52 - 1).map(lambda i: i * 2.0**-52))


@given(weights, us)
@hypothesis_settings(max_examples=80, deadline=None)
def test_pitfall_06_a_draw_never_returns_an_item_of_weight_zero(values: list[float], u: float) -> None:
    row = torch.tensor(values)
    for dtype in (torch.float32, torch.float64):
        assert row[draw(row.to(dtype), u)] > 0
        assert row[draw(row.to(dtype), torch.tensor([u], dtype=torch.float64))] > 0


def test_a_draw_inverts_the_cumulative_sum() -> None:
    row = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0, 0.0])
    found = {u: int(draw(row, u)) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, BELOW_ONE)}
    assert found == {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, BELOW_ONE: 4}
