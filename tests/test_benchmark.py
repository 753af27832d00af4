"""The benchmark: the shape of its document, how lanes take turns, what its ratios are made of, and the yardstick of
transformers' own `generate` beside our engines."""

from __future__ import annotations

import contextlib
import io
import json
import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import save_folder
from transformers import GenerationConfig

from specdemo import benchmark, cli, methods
from specdemo.benchmark import Bench, EngineLane
from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.events import FinishReason
from specdemo.metrics import Metrics, fold
from specdemo.models.loading import Pair, load_pair
from specdemo.settings import Settings
from specdemo.suite import SUITE as SHIPPED
from specdemo.suite import SuitePrompt, read_suite
from specdemo.text import encode_prompt
from specdemo.transformers_lanes import Commit, Generation, TransformersLane, TransformersModels
from specdemo.transformers_lanes import pool as pool_generations

ALL_METHODS = ["standard", "speculative", "prompt-lookup", "hybrid", "ssd", "hf", "hf-lookup", "hf-assisted"]
FIELDS = {
    "method", "path", "prompts", "tokens", "tokens_per_second", "ttft_ms", "speedup", "speedup_spread",
    "speedup_by_category", "acceptance_rate", "alpha", "mean_acceptance_length", "acceptance_by_position",
    "cost_ratio", "verify_cost", "texts_equal",
}  # fmt: skip
SUITE = [
    {"id": "a-1", "category": "a", "prompt": "Say one two one two one two"},
    {"id": "a-2", "category": "a", "prompt": "Count"},
    {"id": "b-1", "category": "b", "prompt": "What now?"},
    {"id": "h-1", "category": "hostile", "prompt": "  "},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_target: Any, tiny_draft: Any) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_folder(tiny_target, folder / "target")
    save_folder(tiny_draft, folder / "draft")
    (folder / "suite.jsonl").write_text("\n".join(map(json.dumps, SUITE)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def pair(folders: Path) -> Pair:
    return load_pair(str(folders / "target"), str(folders / "draft"), "float32", "cpu")


@pytest.fixture(scope="module")
def report(folders: Path) -> str:
    """What `bench` prints for all methods."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main(
            ["bench", "--target", str(folders / "target"), "--draft", str(folders / "draft"), "--dtype", "float32",
             "--device", "cpu", "--suite", str(folders / "suite.jsonl"), "--methods", ",".join(ALL_METHODS[1:]),
             "--max-new-tokens", "20", "--draft-length", "4", "--repeats", "2", "--ignore-eos",
             "--out", str(folders / "out.json")]
        )  # fmt: skip
    assert code == 0
    return out.getvalue()


@pytest.fixture(scope="module")
def document(report: str) -> Any:
    return json.loads(report.splitlines()[-1])


# -- the document ------------------------------------------------------------------------------------------------------


def test_the_last_line_is_the_document(document: Any, report: str, folders: Path) -> None:
    assert list(document) == ["environment", "settings", "results"]
    assert [row["method"] for row in document["results"]] == ALL_METHODS
    assert all(set(row) >= FIELDS for row in document["results"])
    assert json.loads((folders / "out.json").read_text(encoding="utf-8")) == document
    for method in ALL_METHODS:
        assert len(re.findall(rf"^{method} ", report, re.MULTILINE)) == 2  # in both tables


def test_every_lane_ran_the_same_prompts(document: Any) -> None:
    for row in document["results"]:
        assert (row["prompts"], row["tokens"]) == (3, 3 * 2 * 20)
        assert [prompt["id"] for prompt in row["by_prompt"]] == ["a-1", "a-2", "b-1"]
        assert row["tokens_per_second"] > 0
        assert row["ttft_ms"] > 0
        assert row["speedup"] > 0
        assert list(row["speedup_by_category"]) == ["a", "b"]
        spread = row["speedup_spread"]
        assert spread["min"] <= spread["q1"] <= row["speedup"] <= spread["q3"] <= spread["max"]
    assert document["settings"]["prompts"] == {"a": 2, "b": 1}


def test_every_method_says_the_same_in_float32(document: Any) -> None:
    """Among them transformers' own: the yardstick does the same work."""
    assert {row["method"]: row["texts_equal"] for row in document["results"]} == dict.fromkeys(ALL_METHODS, 1.0)
    assert all(prompt["first_divergence"] is None for row in document["results"] for prompt in row["by_prompt"])


def test_the_standard_lane_is_the_measure(document: Any) -> None:
    standard = document["results"][0]
    assert standard["speedup"] == 1.0
    assert standard["speedup_spread"] == dict.fromkeys(("min", "q1", "q3", "max"), 1.0)
    assert standard["mean_acceptance_length"] == 1.0
    assert standard["verify_cost"] is None


def test_costs_are_measured_against_forwards_of_one_position(document: Any) -> None:
    rows = {row["method"]: row for row in document["results"]}
    one = rows["standard"]["forward_ms_by_width"]["1"]
    speculative = rows["speculative"]
    assert speculative["cost_ratio"] > 0
    assert speculative["verify_cost"] == speculative["verify_cost_by_width"]["5"]
    assert speculative["verify_cost"] == pytest.approx(speculative["forward_ms_by_width"]["5"] / one, rel=1e-2)
    assert 0 < speculative["seconds"]["draft"] < speculative["seconds"]["total"]
    assert set(rows["hf"]["seconds"]) == {"total", "first_token"}  # generate does not tell its phases apart


def test_assisted_generation_drafts_as_our_draft_model_does(document: Any) -> None:
    """The same K and the same drafts, so almost the same acceptance: rounds fall otherwise only at the beginning."""
    rows = {row["method"]: row for row in document["results"]}
    ours, theirs = rows["speculative"], rows["hf-assisted"]
    assert theirs["path"] == "transformers generate"
    assert theirs["draft"] == "draft"
    assert 0 < theirs["alpha"] < 1
    assert abs(theirs["alpha"] - ours["alpha"]) < 0.15
    assert len(theirs["acceptance_by_position"]) == 4
    assert rows["hf"]["alpha"] is None


def test_the_environment_is_told_without_names_of_machines_or_folders(document: Any, folders: Path) -> None:
    environment = document["environment"]
    assert environment["torch"] == torch.__version__
    assert environment["python"] == platform.python_version()
    assert environment["processor"]
    assert environment["cores"] >= 1
    assert (environment["precision"], environment["device"]) == ("float32", "cpu")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", environment["date"])
    text = json.dumps(document)
    assert str(folders) not in text
    assert (platform.node() or "\0") not in {value for value in environment.values() if isinstance(value, str)}
    assert (document["settings"]["target"], document["settings"]["draft"]) == ("target", "draft")
    assert (document["settings"]["suite"], document["settings"]["repeats"]) == ("suite.jsonl", 2)


def test_sampled_texts_are_not_compared(pair: Pair) -> None:
    lanes = benchmark.make_lanes(pair, ["hf", "hf-assisted"])
    settings = Settings(max_new_tokens=12, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, ignore_eos=True)
    rows = Bench(pair, lanes, prompts(1), settings).measure().document()["results"]
    assert [row["method"] for row in rows] == ["standard", "hf", "hf-assisted"]
    assert [row["texts_equal"] for row in rows] == [None] * 3
    assert [row["tokens"] for row in rows] == [12] * 3


def test_a_method_that_falls_back_says_so(pair: Pair) -> None:
    alone = replace(pair, draft=None, draft_folder=None)
    lanes = benchmark.make_lanes(alone, ["standard", "speculative"])
    rows = Bench(alone, lanes, prompts(1), Settings(max_new_tokens=8)).measure().document()["results"]
    assert rows[0]["notes"] == []
    assert rows[1]["notes"] == ["target has no draft model here, so prompt-lookup runs in place of speculative."]
    assert rows[1]["draft"] is None


def test_without_names_all_that_can_run_does(pair: Pair) -> None:
    names = [lane.method for lane in benchmark.make_lanes(pair, None)]
    assert names == ["standard", "speculative", "prompt-lookup", "hybrid", "ssd", "hf", "hf-assisted"]
    alone = replace(pair, draft=None, draft_folder=None)
    assert [lane.method for lane in benchmark.make_lanes(alone, None)] == ["standard", "prompt-lookup", "hf"]


# -- draft lengths -----------------------------------------------------------------------------------------------------


def test_several_draft_lengths_are_measured_in_one_run(folders: Path) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main(
            ["bench", "--target", str(folders / "target"), "--draft", str(folders / "draft"), "--dtype", "float32",
             "--device", "cpu", "--suite", str(folders / "suite.jsonl"), "--limit", "1", "--max-new-tokens", "16",
             "--methods", "speculative,hf-assisted,hf,speculative:adaptive", "--draft-length", "3,1", "--ignore-eos"]
        )  # fmt: skip
    assert code == 0
    rows = {row["method"]: row for row in json.loads(out.getvalue().splitlines()[-1])["results"]}
    assert list(rows) == [
        "standard", "speculative:1", "speculative:3", "hf-assisted:1", "hf-assisted:3", "hf", "speculative:adaptive",
    ]  # fmt: skip
    assert [row["draft_length"] for row in rows.values()] == [None, 1, 3, 1, 3, None, 3]
    assert [row["adaptive"] for row in rows.values()] == [None, False, False, False, False, None, True]
    assert [len(row["acceptance_by_position"]) for row in rows.values()][1:5] == [1, 3, 1, 3]
    assert list(rows["speculative:1"]["by_category"]["b"]["acceptance_by_position"]) != []
    assert {row["texts_equal"] for row in rows.values()} == {1.0}
    assert len(rows["speculative:adaptive"]["verify_cost_by_width"]) > 1  # K varied


def test_one_draft_length_holds_for_all_lanes_and_needs_no_mention(pair: Pair) -> None:
    assert [lane.method for lane in benchmark.make_lanes(pair, ["hybrid", "hf"], draft_lengths=[4])] == [
        "standard", "hybrid", "hf",
    ]  # fmt: skip
    assert benchmark.variant_settings("hybrid", Settings(draft_length=4)) == Settings(draft_length=4)
    adaptive = Settings(draft_length=4, adaptive=True)
    assert benchmark.variant_settings("hybrid:2", adaptive) == Settings(draft_length=2)
    assert benchmark.variant_settings("hybrid:adaptive", Settings(draft_length=4)) == adaptive


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("standard:2", "standard drafts nothing"),
        ("hf:2", "hf drafts nothing"),
        ("hf-assisted:adaptive", "a fixed number"),
        ("speculative:two", "'two' is no draft length"),
        ("speculative:17", "from 0 to 16"),
        ("quick:2", "no method 'quick:2'"),
    ],
)
def test_a_draft_length_that_a_method_cannot_have_is_told_before_anything_is_loaded(name: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason):
        benchmark.check_methods([name])


# -- turns and ratios --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FakeRun:
    metrics: Metrics
    token_ids: tuple[int, ...]
    finish_reason: FinishReason = "length"


@dataclass
class FakeLane:
    """Takes `tpots` in turn, the first for the warm-up, and notes when it ran."""

    method: str
    tpots: list[float]
    log: list[tuple[str, int]]
    empty: Metrics
    precision = forward_path = "fake"
    draft = draft_precision = None
    notes = ()

    def run(self, prompt_ids: Sequence[int], settings: Settings, should_stop: Callable[[], bool]) -> FakeRun:
        tpot = self.tpots.pop(0)
        self.log.append((self.method, len(prompt_ids)))
        metrics = replace(self.empty, tpot_s=tpot, tokens_per_second=1 / tpot, ttft_s=0.5, total_s=10 * tpot)
        return FakeRun(metrics, tuple(range(settings.max_new_tokens)))

    def pool(self, runs: Sequence[FakeRun]) -> Metrics:
        return self.empty


def prompts(count: int) -> list[SuitePrompt]:
    return [SuitePrompt(f"p-{i}", "ab"[i % 2], "word" * (i + 1)) for i in range(count)]


def fake_lanes(tpots: dict[str, list[float]]) -> tuple[list[FakeLane], list[tuple[str, int]]]:
    log: list[tuple[str, int]] = []
    return [FakeLane(name, [1.0, *values], log, fold([])) for name, values in tpots.items()], log


def test_lanes_take_turns_in_alternating_order(pair: Pair) -> None:
    lanes, log = fake_lanes({"standard": [1.0] * 6, "x": [1.0] * 6, "y": [1.0] * 6})
    Bench(pair, lanes, prompts(3), Settings(), repeats=2, raw=True).measure()
    warm, timed = log[:3], log[3:]
    assert [name for name, _ in warm] == ["standard", "x", "y"]
    names = ["".join(name[0] for name, _ in timed[i : i + 3]) for i in range(0, 18, 3)]
    assert names == ["sxy", "yxs", "sxy", "yxs", "sxy", "yxs"]  # each prompt in both orders over two passes
    assert [length for _, length in timed[::3]] == [4, 8, 12] * 2


def test_speedup_is_the_median_of_ratios_on_the_same_prompt(pair: Pair) -> None:
    # per prompt 2, 4 and 0.5 times as fast: the median is 2, while the ratio of sums would be 13 / 23.5
    lanes, _ = fake_lanes({"standard": [2.0, 1.0, 10.0], "x": [1.0, 0.25, 20.0]})
    row = Bench(pair, lanes, prompts(3), Settings()).measure().document()["results"][1]
    assert row["speedup"] == 2.0
    assert row["speedup_spread"] == {"min": 0.5, "q1": 1.25, "q3": 3.0, "max": 4.0}
    assert row["speedup_by_category"] == {"a": 1.25, "b": 4.0}
    assert row["tokens_per_second"] == 1.0
    assert row["by_category"]["a"]["speedup_spread"]["max"] == 2.0


def test_repeats_are_paired_within_their_pass(pair: Pair) -> None:
    # the machine is ten times slower in the second pass: each ratio is still 2
    lanes, _ = fake_lanes({"standard": [2.0, 20.0], "x": [1.0, 10.0]})
    row = Bench(pair, lanes, prompts(1), Settings(), repeats=2).measure().document()["results"][1]
    assert (row["speedup"], row["speedup_spread"]["min"]) == (2.0, 2.0)


def test_a_run_too_short_for_a_speed_has_no_ratio(pair: Pair) -> None:
    lanes = benchmark.make_lanes(pair, ["standard", "prompt-lookup"])
    results = Bench(pair, lanes, prompts(1), Settings(max_new_tokens=1)).measure()
    document = results.document()
    assert document["results"][1]["speedup"] is None
    assert document["results"][1]["speedup_spread"] is None
    assert "prompt-lookup" in benchmark.tables(document)


def test_acceptance_is_pooled_over_all_tokens(pair: Pair) -> None:
    lane = EngineLane(pair, "speculative")
    settings = Settings(max_new_tokens=30, ignore_eos=True)
    runs = [lane.run(encode_prompt(pair.tokenizer, text), settings, lambda: False) for text in ("ab", "Count", "What?")]
    alone = lane.pool(runs[:1])
    assert (alone.alpha, alone.drafted, alone.accepted) == tuple(
        getattr(runs[0].metrics, name) for name in ("alpha", "drafted", "accepted")
    )
    assert alone.mean_acceptance_length == runs[0].metrics.mean_acceptance_length
    assert alone.acceptance_by_position == runs[0].metrics.acceptance_by_position
    pooled = lane.pool(runs)
    assert pooled.drafted == sum(run.metrics.drafted for run in runs)
    assert pooled.acceptance_rate == pooled.accepted / pooled.drafted
    assert pooled.mean_acceptance_length == 29 * 3 / pooled.rounds


def test_rounds_that_a_stop_string_took_back_are_not_pooled(pair: Pair) -> None:
    lane = EngineLane(pair, "speculative")
    run = lane.run(encode_prompt(pair.tokenizer, "Count"), Settings(max_new_tokens=30, ignore_eos=True), lambda: False)
    cut = replace(run.finished, token_ids=run.token_ids[:-1])
    shorter = lane.pool([benchmark.EngineRun((*run.events[:-1], cut))])
    assert shorter.rounds == run.metrics.rounds - 1


# -- the suite ---------------------------------------------------------------------------------------------------------


def test_the_suite_is_read_by_category() -> None:
    everything = read_suite(SHIPPED)
    categories = {prompt.category for prompt in everything}
    assert categories == {"chat", "code", "grounded", "creative", "multilingual"}
    two = read_suite(SHIPPED, ["code", "hostile"], limit=2)
    assert [prompt.id for prompt in two] == ["code-01", "code-02", "hostile-01", "hostile-02"]


def test_a_bad_suite_is_told(tmp_path: Path) -> None:
    suite = tmp_path / "suite.jsonl"
    suite.write_text('{"id": "x", "category": "a", "prompt": "p"}\n{"id": "y"}\n', encoding="utf-8")
    with pytest.raises(BadRequest, match=r"suite\.jsonl, line 2"):
        read_suite(suite)
    suite.write_text("\n", encoding="utf-8")
    with pytest.raises(BadRequest, match="no prompts"):
        read_suite(suite)


def test_a_prompt_that_cannot_be_served_is_told_before_anything_runs(pair: Pair) -> None:
    for prompt, reason in (("  ", "p: The prompt is empty"), ("a" * 600, "p has 600 tokens and the context holds 512")):
        lanes, log = fake_lanes({"standard": []})
        with pytest.raises(BadRequest, match=reason):
            Bench(pair, lanes, [SuitePrompt("p", "a", prompt)], Settings(), raw=True).measure()
        assert log == []


# -- transformers' own -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(pair: Pair) -> TransformersModels:
    return TransformersModels(pair)


def ids_of(pair: Pair) -> list[int]:
    return encode_prompt(pair.tokenizer, "Say one two one two one two")


@pytest.mark.parametrize("method", ["hf", "hf-lookup", "hf-assisted"])
@pytest.mark.parametrize("setting", [{}, {"repetition_penalty": 1.3}, {"draft_length": 1}, {"max_new_tokens": 2}])
def test_generate_says_what_our_standard_lane_says(
    pair: Pair, models: TransformersModels, method: str, setting: dict[str, Any]
) -> None:
    settings = Settings(**{"max_new_tokens": 40, **setting})
    *_, ours = methods.run(pair, "standard", ids_of(pair), settings, explain=False)
    theirs = TransformersLane(method, models).run(ids_of(pair), settings)
    assert theirs.token_ids == ours.token_ids  # type: ignore[union-attr]
    assert theirs.finish_reason == ours.finish_reason  # type: ignore[union-attr]


def test_generate_ends_at_eos_and_at_stop_strings_as_we_do(pair: Pair, models: TransformersModels) -> None:
    settings = Settings(max_new_tokens=30, ignore_eos=True)
    *_, free = methods.run(pair, "standard", ids_of(pair), settings)
    ids, text = free.token_ids, free.text  # type: ignore[union-attr]
    ending = replace(pair, eos_ids=frozenset({ids[12]}))
    for method in ("hf", "hf-lookup", "hf-assisted"):
        at_eos = TransformersLane(method, TransformersModels(ending)).run(
            ids_of(pair), replace(settings, ignore_eos=False)
        )
        assert (at_eos.token_ids, at_eos.finish_reason) == (ids[: ids.index(ids[12]) + 1], "eos")
        stopping = replace(settings, stop=(text[9:11],))
        *_, ours = methods.run(pair, "standard", ids_of(pair), stopping)
        stopped = TransformersLane(method, models).run(ids_of(pair), stopping)
        assert (stopped.token_ids, stopped.finish_reason) == (ours.token_ids, "stop")  # type: ignore[union-attr]
        assert sum(commit.tokens for commit in stopped.commits) < 20  # it stopped there, and was not cut afterwards


def test_commits_tell_what_each_forward_did(pair: Pair, models: TransformersModels) -> None:
    settings = Settings(max_new_tokens=24, ignore_eos=True, draft_length=3)
    for method, drafted in (("hf", {0}), ("hf-assisted", {0, 1, 2, 3})):
        run = TransformersLane(method, models).run(ids_of(pair), settings)
        assert sum(commit.tokens for commit in run.commits) == 24
        assert {commit.drafted for commit in run.commits} <= drafted
        assert all(commit.tokens <= commit.drafted + 1 for commit in run.commits)
        times = [commit.t for commit in run.commits]
        assert 0 < times[0] < times[-1] <= run.total_s
        assert times == sorted(times)
    assert run.commits[0].drafted == 3


def test_numbers_of_generate_are_counted_as_ours_are() -> None:
    # K = 2. First call: all kept, then first refused; second call: second refused. Times in seconds.
    first = Generation((1,) * 4, "length", (Commit(1.0, 3, 2), Commit(3.0, 1, 2)), 3.5)
    second = Generation((1,) * 4, "length", (Commit(2.0, 2, 2), Commit(4.0, 2, 1)), 4.5)
    alone = first.metrics
    assert (alone.ttft_s, alone.total_s, alone.tpot_s) == (1.0, 3.5, 2.0)  # one token came after the first commit
    both = pool_generations([first, second])
    assert (both.tokens, both.drafted, both.accepted, both.rounds) == (8, 7, 4, 4)
    assert both.accepted_histogram == (1, 2, 1)
    assert both.alpha == 4 / 6
    assert both.mean_acceptance_length == 2.0
    assert both.acceptance_by_position == (3 / 4, 1 / 2)
    assert both.tpot_s == (2.0 + 2.0) / (1 + 2)


def test_a_models_own_advice_is_not_followed_and_survives(
    pair: Pair, models: TransformersModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when `generate` fails."""
    lane = TransformersLane("hf-assisted", models)
    settings = Settings(max_new_tokens=40, draft_length=7, ignore_eos=True)
    plain = lane.run(ids_of(pair), settings)
    assert len(set(plain.token_ids)) < 40  # so that the advice would change it
    advice = GenerationConfig(no_repeat_ngram_size=1, do_sample=True, top_k=2, max_length=3)
    for model in (models.target, models.assistant):
        monkeypatch.setattr(model, "generation_config", advice)
    random_state = torch.random.get_rng_state()
    assert lane.run(ids_of(pair), settings).token_ids == plain.token_ids
    seen = {}

    def failing(**_arguments: Any) -> None:
        seen.update(models.assistant.generation_config.to_dict())
        raise RuntimeError("broken")

    monkeypatch.setattr(models.target, "generate", failing)
    with pytest.raises(RuntimeError, match="broken"):
        lane.run(ids_of(pair), settings)
    assert (seen["num_assistant_tokens"], seen["num_assistant_tokens_schedule"]) == (7, "constant")
    assert seen["assistant_confidence_threshold"] == 0.0
    assert models.target.generation_config is advice
    assert models.assistant.generation_config is advice
    assert not models.target._forward_pre_hooks
    assert torch.equal(torch.random.get_rng_state(), random_state)


def test_sampling_by_generate_repeats_with_the_seed(pair: Pair, models: TransformersModels) -> None:
    lane = TransformersLane("hf", models)
    texts = [
        lane.run(ids_of(pair), Settings(max_new_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)).token_ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_generate_is_stopped_within_a_round(pair: Pair, models: TransformersModels) -> None:
    asked = 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    run = TransformersLane("hf", models).run(ids_of(pair), Settings(max_new_tokens=50, ignore_eos=True), should_stop)
    assert (len(run.token_ids), run.finish_reason) == (3, "cancelled")


def test_what_generate_cannot_do_is_said(
    pair: Pair, models: TransformersModels, tmp_path: Path, tiny_draft: Any
) -> None:
    alone = replace(pair, draft=None, draft_folder=None)
    with pytest.raises(BadRequest, match="--assistant"):
        TransformersLane("hf-assisted", TransformersModels(alone))
    with pytest.raises(BadRequest, match="hf-lookup drafts at least one token"):
        TransformersLane("hf-lookup", models).run(ids_of(pair), Settings(draft_length=0))
    with pytest.raises(ModelUnavailable, match="no folder"):
        TransformersLane("hf-assisted", TransformersModels(alone, str(tmp_path / "missing")))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelUnavailable, match="transformers cannot load"):
        TransformersLane("hf-assisted", TransformersModels(alone, str(tmp_path)))


def test_an_assistant_can_be_another_model_than_the_draft(pair: Pair, folders: Path) -> None:
    """As the plain export of a draft whose own form only we can read."""
    alone = replace(pair, draft=None, draft_folder=None)
    lane = TransformersLane("hf-assisted", TransformersModels(alone, str(folders / "target")))
    run = lane.run(ids_of(pair), Settings(max_new_tokens=13, draft_length=3, ignore_eos=True))
    assert run.metrics.alpha == 1.0  # the target assists itself
    assert [commit.tokens for commit in run.commits] == [4, 4, 4, 1]
