"""The scripts in `bench/`: each runs from beginning to end on tiny models, and what it computes is computed by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_folders import save_folder

from bench import gpu_check, llama_cpp, lookup_bound, ssd_settings, table
from bench.lookup_bound import Answer, bound, cost_of, drafter_speedup, latest_length, oracle_length
from specdemo.models.loading import Pair, load_pair

SUITE = [
    {"id": "a-1", "category": "a", "prompt": "Say one two one two one two"},
    {"id": "b-1", "category": "b", "prompt": "What now?"},
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, tiny_target: Any, tiny_draft: Any) -> Pair:
    folder = tmp_path_factory.mktemp("models")
    save_folder(tiny_target, folder / "target")
    save_folder(tiny_draft, folder / "draft")
    return load_pair(str(folder / "target"), str(folder / "draft"), "float32", "cpu")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = tmp_path / "suite.jsonl"
    path.write_text("\n".join(map(json.dumps, SUITE)), encoding="utf-8")
    return path


# -- gpu_check ---------------------------------------------------------------------------------------------------------


def test_the_check_for_a_card_runs_on_the_cpu_with_tiny_shapes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found" / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--embedded", str(tmp_path), "--out", str(out)]) == 0
    said = capsys.readouterr().out.splitlines()
    found = json.loads(said[-1])
    assert said[0].startswith("shapes: tiny shapes, since there is no CUDA here")
    assert found["shapes"]["tiny"] is True
    assert [line.partition(":")[0] for line in said[1:-1]] == [
        "copy", "graphs", "standard", "round", "acceptance_0.6", "acceptance_0.8", "acceptance_0.9", "race", "nf4",
        "int8", "generate", "compiled",
    ]  # fmt: skip
    assert json.loads(out.read_text(encoding="utf-8")).keys() == found.keys()
    assert not [line for line in said if "FAILED" in line or "DIFFERENT" in line]
    assert found["graphs"]["same_argmax"] == found["graphs"]["positions"]
    assert found["acceptance_0.6"]["alpha"] < found["acceptance_0.9"]["alpha"]
    assert found["generate"]["standard_speedup"] > 0
    for name in ("nf4", "int8"):
        assert found[name]["verify_cost"] > 0
        assert found[name]["rows_apart"] < 1e-4  # float32 here
    assert found["compiled"]["said"].startswith("left out")


def test_a_part_that_fails_is_one_sentence_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(check: gpu_check.Check) -> None:
        raise RuntimeError("out of luck\nand a long trace")

    def fine(check: gpu_check.Check) -> None:
        check.say("race", "ran", ok=True)

    parts = (gpu_check.Part("graphs", 0, broken), gpu_check.Part("race", 0, fine))
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    out = tmp_path / "gpu.json"
    assert gpu_check.main(["--device", "cpu", "--out", str(out)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == ["graphs: FAILED (RuntimeError: out of luck)", "race: ran"]
    assert json.loads(out.read_text(encoding="utf-8"))["graphs"]["ok"] is False


def test_a_part_without_time_is_left_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    check = gpu_check.Check(gpu_check.torch.device("cpu"), False, 8, 0.0, tmp_path, None)
    check.run(gpu_check.Part("copy", 10, gpu_check.copy))
    assert capsys.readouterr().out == "copy: left out: no time\n"


def test_the_floor_counts_every_weight_that_a_token_reads(tmp_path: Path) -> None:
    check = gpu_check.Check(gpu_check.torch.device("cpu"), True, 8, 0.0, tmp_path, None)
    shape = check.target_shape
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    attention = hidden * (2 * hidden + 2 * hidden * shape["num_key_value_heads"] // shape["num_attention_heads"])
    layer = attention + 3 * hidden * shape["intermediate_size"] + 2 * hidden
    assert gpu_check.target_bytes(check) == 4 * (layers * layer + hidden + shape["vocab_size"] * hidden)


# -- lookup_bound ------------------------------------------------------------------------------------------------------

# The prompt has 1 2 3 4 and, later, 1 2 9; the answer begins with 1 2 and goes on with 3 4.
TWO_COPIES = Answer("x", "a", [1, 2, 3, 4, 5, 1, 2, 9, 8, 1, 2, 3, 4, 5, 7], 9)


def free(k: int) -> float:
    return 1.0


def test_the_oracle_knows_which_occurrence_goes_on_as_the_answer_does() -> None:
    ids = TWO_COPIES.ids
    assert TWO_COPIES.first == 10
    assert [oracle_length(ids, at, 9) for at in (10, 11, 12)] == [4, 3, 2]
    assert oracle_length(ids, 10, 2) == 2
    assert [latest_length(ids, at, 9) for at in (10, 11, 12)] == [1, 0, 2]  # after 1 2 the latest copy says 9
    assert latest_length([1, 1, 1, 1], 2, 2) == 2  # a copy may run into its own tokens


def test_bounds_are_the_best_division_into_rounds() -> None:
    # five tokens: the oracle's one round of four and an extra; the latest copy gives 2 3 | 4 5 7
    assert bound(TWO_COPIES, 9, free, oracle_length) == 5.0
    assert bound(TWO_COPIES, 9, free, latest_length) == 5 / 2
    assert bound(TWO_COPIES, 1, free, oracle_length) == 5 / 3
    assert bound(TWO_COPIES, 9, lambda k: 1.0 + 10.0 * k, oracle_length) == 1.0  # then it drafts nothing
    assert bound(TWO_COPIES, 9, lambda k: 1.0 + 0.5 * k, oracle_length) == 5 / 3.0


def test_our_drafter_is_counted_as_the_engine_would_run_it() -> None:
    repeated = Answer("x", "a", [1, 2, 3, 4] * 6, 12)
    assert drafter_speedup(repeated, 5, free) == 11 / 2  # 6 tokens a round
    assert drafter_speedup(repeated, 5, lambda k: 1.0 + 0.1 * k) == 11 / (1.5 + 1.4)  # the last drafts what fits: 4
    assert drafter_speedup(Answer("x", "a", list(range(9)), 3), 5, free) == 1.0


def test_a_rounds_cost_is_read_from_measured_forwards() -> None:
    cost = cost_of({"1": 1.0, "2": 1.1, "5": 1.4, "6": None})
    assert [cost(k) for k in (0, 1, 4)] == [1.0, 1.1, 1.4]
    assert cost(2) == pytest.approx(1.2)
    assert cost(8) == pytest.approx(1.8)
    assert cost_of({})(2) == pytest.approx(1.08)


def test_the_script_puts_the_measured_speedup_beside_its_bound(
    pair: Pair, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "method": "prompt-lookup:4",
        "draft_length": 4,
        "verify_cost_by_width": {"1": 1.0, "5": 1.2},
        "by_prompt": [{"id": "a-1", "speedup": 1.25}, {"id": "b-1", "speedup": None}],
    }
    result, out = tmp_path / "result.json", tmp_path / "bound.json"
    result.write_text(json.dumps({"settings": {"draft_length": 8}, "results": [row]}), encoding="utf-8")
    arguments = ["--target", str(pair.target_folder), "--dtype", "float32", "--suite", str(suite)]
    arguments += ["--max-new-tokens", "24", "--draft-length", "4,8", "--result", str(result), "--out", str(out)]
    assert lookup_bound.main(arguments) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text(encoding="utf-8")) == found
    four, eight = (found["by_draft_length"][length] for length in ("4", "8"))
    assert four["round_cost"] == [1.0, 1.05, 1.1, 1.15, 1.2]
    assert (four["measured_costs"], eight["measured_costs"]) == (True, False)
    figures = four["by_category"]["a"]
    assert figures["oracle"] >= figures["latest"] >= figures["drafter"] > 0
    assert figures["measured_share"] == pytest.approx(1.25 / figures["latest"])
    assert "measured" not in four["by_category"]["b"]


# -- table -------------------------------------------------------------------------------------------------------------


def document() -> dict[str, Any]:
    """Two prompts of a, one of b; y is 2, 4 and 0.5 times as fast as standard."""

    def row(method: str, speedups: list[float | None], alpha: float | None) -> dict[str, Any]:
        cell = {"acceptance_rate": alpha, "alpha": alpha, "mean_acceptance_length": 2.0}
        return {
            "method": method,
            "precision": "int8" if method != "hf" else "float32",
            "draft_length": None if alpha is None else 4,
            "texts_equal": 0.5 if alpha is None else None,
            "acceptance_by_position": [] if alpha is None else [0.5, 0.25],
            "by_category": {"a": cell, "b": cell},
            "by_prompt": [
                {"id": str(i), "category": "aab"[i], "speedup": speedup} for i, speedup in enumerate(speedups)
            ],
        }

    return {
        "environment": {
            "device_name": "Chip", "cores": 2, "load_average": 0.1, "torch": "2", "revision": "abc",
            "date": "2026-01-02T03:04:05+00:00", "precision": "int8",
        },
        "settings": {"target": "T", "temperature": 0.0, "max_new_tokens": 96, "prompts": {"a": 2, "b": 1},
                     "repeats": 3, "draft_length": 4},
        "results": [
            row("standard", [1.0, 1.0, 1.0], None), row("y", [2.0, 4.0, 0.5], 0.5), row("hf", [0.5, None, 0.25], None),
        ],
    }  # fmt: skip


def test_the_table_has_medians_and_quartiles_of_the_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document()), encoding="utf-8")
    assert table.main([str(path)]) == 0
    caption, speedups, drafts = capsys.readouterr().out.strip().split("\n\n")
    assert caption.startswith("T, int8, Chip (2 cores, load 0.1), greedy, 96 tokens, K = 4, 3 prompts x 3,")
    assert speedups.splitlines() == [
        "| x standard | all | a | b |",
        "| --- | --- | --- | --- |",
        "| standard | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | 1.00 |",
        "| y | 2.00 (1.25 to 3.00) | 3.00 (2.50 to 3.50) | 0.50 |",
        "| hf (float32) | 0.38 (0.31 to 0.44) | 0.50 | 0.25 |",
    ]
    assert drafts.splitlines()[2:] == ["| y | - | 0.50 0.25 | 0.50 / 2.00 | 0.50 / 2.00 |"]


def test_the_table_can_take_another_method_as_the_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(document()), encoding="utf-8")
    assert table.main([str(path), "--against", "hf", "--categories", "b"]) == 0
    assert "| y | 2.00 | 2.00 |" in capsys.readouterr().out
    for arguments, reason in ((["--against", "z"], "no method 'z'"), (["--categories", "c"], "no category 'c'")):
        with pytest.raises(SystemExit, match=reason):
            table.main([str(path), *arguments])


# -- llama_cpp ---------------------------------------------------------------------------------------------------------

LIBRARY = '''
__version__ = "0.0.1"


class Llama:
    """After token t comes (7 t + 3) mod 80 + 5; the loop is that of the real library."""

    def __init__(self, model_path, n_ctx, n_threads, n_threads_batch, verbose, draft_model=None):
        assert open(model_path).read() == "weights"
        self.draft_model, self.cache = draft_model, []

    def reset(self):
        self.cache = []

    def eval(self, tokens):
        self.cache += tokens

    def generate(self, tokens, temp, repeat_penalty):
        assert (temp, repeat_penalty) == (0.0, 1.0)
        tokens, at = list(tokens), len(tokens) - 1
        while True:
            self.eval(tokens)
            while at < len(self.cache):
                token = (7 * self.cache[at] + 3) % 80 + 5
                at += 1
                yield token
                tokens = [token]
                if at < len(self.cache) and token != self.cache[at]:
                    del self.cache[at:]
                    break
            if self.draft_model is not None:
                tokens += self.draft_model(self.cache + tokens)
'''
SPECULATIVE = '''
class LlamaPromptLookupDecoding:
    """The first guess is right, the second wrong."""

    def __init__(self, num_pred_tokens):
        self.count = num_pred_tokens

    def __call__(self, ids):
        return [(7 * ids[-1] + 3) % 80 + 5, 1][: self.count]
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for llama-cpp-python, where the worker's Python finds it, and a file to load."""
    package = tmp_path / "site" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LIBRARY, encoding="utf-8")
    (package / "llama_speculative.py").write_text(SPECULATIVE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    gguf = tmp_path / "model.gguf"
    gguf.write_text("weights", encoding="utf-8")
    return gguf


def test_llama_cpp_is_measured_in_turns_with_ours(
    library: Path, pair: Pair, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "load_pair", lambda dtype: pair)
    out = tmp_path / "result.json"
    arguments = ["--python", sys.executable, "--gguf", str(library), "--out", str(out), "--suite", str(suite)]
    arguments += ["--methods", "prompt-lookup", "--max-new-tokens", "12"]
    assert llama_cpp.main(arguments) == 0
    rows = {row["method"]: row for row in json.loads(out.read_text(encoding="utf-8"))["results"]}
    assert list(rows) == ["standard", "prompt-lookup", "llama.cpp", "llama.cpp-lookup:2"]
    plain, drafting = rows["llama.cpp"], rows["llama.cpp-lookup:2"]
    assert (plain["path"], plain["precision"]) == ("llama-cpp-python 0.0.1", "Q4_1")
    assert (plain["draft_length"], drafting["draft_length"]) == (None, 2)
    assert plain["tokens"] == drafting["tokens"] == 24  # it did not stop at an EOS, and neither did ours
    assert plain["mean_acceptance_length"] == 1.0
    assert drafting["acceptance_by_position"] == [1.0, 0.0]
    assert drafting["accepted_histogram"][1] > 0
    assert plain["tokens_per_second"] > 0


def test_a_llama_cpp_that_is_not_there_is_said(
    library: Path, pair: Pair, suite: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_cpp, "load_pair", lambda dtype: pair)
    monkeypatch.delenv("PYTHONPATH")
    for python, gguf, reason in (
        (sys.executable, library, "install it with"),
        (str(tmp_path / "nothing"), library, "cannot be started"),
        (sys.executable, tmp_path / "no.whl", "fetch it again"),
    ):
        arguments = ["--python", python, "--gguf", str(gguf), "--out", str(tmp_path / "o"), "--suite", str(suite)]
        with pytest.raises(SystemExit, match=reason):
            llama_cpp.main(arguments)


# -- ssd_settings ------------------------------------------------------------------------------------------------------


def test_settings_of_ssd_are_compared_with_speculative_decoding_on_the_same_prompts(
    tiny_target: Any, tiny_draft: Any, suite: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [save_folder(tiny_target, tmp_path / "target"), save_folder(tiny_draft, tmp_path / "draft")]
    out = tmp_path / "settings.json"
    chosen = [
        "--target",
        str(models[0]),
        "--draft",
        str(models[1]),
        "--dtype",
        "float32",
        "--settings",
        "3x6,2x4+lookup",
        "--suite",
        str(suite),
        "--categories",
        "a,b",
        "--max-new-tokens",
        "12",
    ]
    assert ssd_settings.main([*chosen, "--out", str(out)]) == 0
    document = json.loads(out.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == document
    assert [row["setting"] for row in document["rows"]] == ["3x6", "2x4+lookup"]
    for row in document["rows"]:
        assert row["prompts"] == row["same_texts"] == 2  # float32: SSD writes what speculative decoding writes
        assert row["ratio_least"] <= row["ratio"] <= row["ratio_greatest"]
        assert 0.0 <= row["hit_rate"] <= 1.0
        assert row["known_ms"] > 0.0


def test_a_setting_is_read_from_its_name() -> None:
    settings = ssd_settings.settings_of("4x8+lookup", 64)
    assert (settings.draft_length, settings.fan_out_budget, settings.fallback) == (4, 8, "prompt-lookup")
    assert ssd_settings.settings_of("1x2", 64).fallback == "draft-model"
