"""`bench --precisions`: memory, speed and the cost of verifying for each way of keeping the target, really run."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from test_cli import run
from tiny_folders import save_folder
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo import cli, precisions
from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.models.memory import free_memory

NAMES = ("float32", "lean8", "int8", "nf4")
BENCH = ("bench", "--methods", "speculative,prompt-lookup", "--max-new-tokens", "8", "--device", "cpu", "--ignore-eos")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 6 million numbers with the tiny tokenizer and a suite."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        folder = save_folder(LlamaForCausalLM(config), tmp_path_factory.mktemp("precisions") / "model")
    prompt = {"id": "a-1", "category": "a", "prompt": "one two one two"}
    (folder / "suite.jsonl").write_text(json.dumps(prompt), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def document(folder: Path) -> dict[str, Any]:
    out = io.StringIO()
    names = ["--target", str(folder), "--draft", str(folder), "--suite", str(folder / "suite.jsonl")]
    with contextlib.redirect_stdout(out):
        assert cli.main([*BENCH, *names, "--precisions", ",".join(NAMES)]) == 0
    shown = out.getvalue()
    assert "verify cost" in shown
    assert "memory" in shown
    document: dict[str, Any] = json.loads(shown.splitlines()[-1])
    return document


def test_each_precision_has_its_memory_speed_and_verify_cost(document: dict[str, Any]) -> None:
    rows = {row["kept"]: row for row in document["precisions"]}
    assert list(rows) == list(NAMES)
    assert [row["precision"] for row in rows.values()] == ["float32", "int8", "int8", "nf4"]
    assert "bitsandbytes" in rows["int8"]["path"]
    assert "lean" in rows["lean8"]["path"]
    for row in rows.values():
        assert row["tokens_per_second"] > 0
        assert row["forward_ms"] > 0
        assert row["verify_cost"] > 0
        assert row["planned"] > 0


def test_memory_is_what_the_weights_really_take(document: dict[str, Any]) -> None:
    rows = {row["kept"]: row for row in document["precisions"]}
    found = {name: (row["memory"], row["planned"]) for name, row in rows.items()}
    assert all(held == pytest.approx(planned, rel=0.05) for held, planned in found.values()), found
    assert rows["nf4"]["memory"] < rows["int8"]["memory"] < rows["float32"]["memory"]


def test_every_lane_of_every_precision_is_in_the_results(document: dict[str, Any]) -> None:
    lanes = [(row["kept"], row["method"]) for row in document["results"]]
    assert lanes == [(name, method) for name in NAMES for method in ("standard", "speculative", "prompt-lookup")]
    assert all(row["texts_equal"] == 1.0 for row in document["results"] if row["kept"] != "lean8")
    assert document["settings"]["precisions"] == list(NAMES)


def test_one_that_cannot_be_had_is_a_row_with_its_reason(document: dict[str, Any]) -> None:
    def load(_dtype: str, quantize: str) -> Any:
        raise ModelUnavailable(f"no {quantize} here.")

    with pytest.raises(ModelUnavailable, match="no nf4 here"):
        precisions.measure(["int8", "nf4"], load, lambda pair: {})
    shown = precisions.tables({**document, "precisions": [{"kept": "nf4", "reason": "no nf4 here."}], "results": []})
    assert "nf4: no nf4 here." in shown


def test_an_unknown_precision_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(BadRequest, match="no precision 'int3'"):
        precisions.measure(["float32", "int3"], lambda dtype, quantize: pytest.fail("was loaded"), lambda pair: {})
    told = run(*BENCH, "--precisions", "int3")
    assert told.code == 2
    assert len(told.err.strip().splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the C library hands memory back when asked on Linux")
def test_memory_that_was_released_goes_back_to_the_system() -> None:
    def held() -> int:
        free_memory()
        return int(psutil.Process().memory_info().rss)

    before = held()
    blocks = [torch.ones(1 << 14) for _ in range(4000)]  # 64 KiB each: from the heap, not mapped for themselves
    assert held() - before > 200e6
    del blocks
    assert held() - before < 80e6
