"""Code made while the program runs: its arithmetic, its threads, and machines that cannot run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specdemo.models import native
from specdemo.models.linear import best_cpu_precision, kernel_obstacle, precision_obstacle
from specdemo.models.native import (
    FLOAT,
    FLOATS,
    LANES,
    LONG,
    POINTER,
    Builder,
    Kernel,
    record,
    scratch,
)

pytestmark = pytest.mark.skipif(kernel_obstacle() is not None, reason=f"needs {kernel_obstacle()}")

FIELDS = {"source": POINTER, "target": POINTER, "count": LONG}


def exponentials(build: Builder, call: dict[str, Any], thread: Any, threads: Any) -> None:
    """Vector number i is done by thread i % threads."""
    stop = call["count"]
    with build.loop(build.long(0), stop, LANES) as part:
        vector = build.udiv(part.index, build.long(LANES))
        with build.if_then(build.icmp_unsigned("==", build.urem(vector, threads), thread)):
            value = build.exponential(build.read(call["source"], part.index, FLOAT, FLOATS))
            build.write(value, call["target"], part.index, FLOAT)


def run(kernel: Kernel, values: torch.Tensor, threads: int) -> torch.Tensor:
    result = torch.zeros_like(values)
    kernel(record(**FIELDS)(values.data_ptr(), result.data_ptr(), values.numel()), threads)
    return result


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_exponential_is_right_to_the_last_bits(threads: int) -> None:
    values = torch.cat([torch.linspace(-87, 88, 100_000), torch.linspace(-2, 2, 100_000)])
    result = run(Kernel(FIELDS, exponentials), values, threads)
    torch.testing.assert_close(result.double(), values.double().exp(), rtol=3e-7, atol=0)


def test_beyond_its_range_the_exponential_stays_at_its_ends() -> None:
    values = torch.tensor([-1e30, -200.0, float("-inf"), 89.0, 1e30, float("inf"), 0.0, 1.0])
    result = run(Kernel(FIELDS, exponentials), values, 1)
    assert (result[:3] < 2e-38).all()
    assert (result[3:6] > 1e38).all()
    assert result[6] == 1.0
    assert run(Kernel(FIELDS, exponentials), torch.full((8,), float("nan")), 1).isnan().all()


def test_without_torchs_openmp_one_thread_does_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_openmp", lambda: None)
    values = torch.linspace(-5, 5, 64)
    torch.testing.assert_close(run(Kernel(FIELDS, exponentials), values, 2), values.exp())


def test_torchs_openmp_is_found_here() -> None:
    assert native._openmp() is not None


def test_scratch_grows_and_is_kept() -> None:
    first = scratch(100)
    assert scratch(50) == first
    assert scratch(native._scratch.memory.numel() + 1)
    assert native._scratch.memory.numel() > 100


def test_a_processor_without_avx2_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel_obstacle.cache_clear()
    monkeypatch.setattr(native.binding, "get_host_cpu_features", lambda: {"avx2": False, "fma": True, "f16c": True})
    try:
        cpu = torch.device("cpu")
        for precision in ("float16", "int8"):
            assert "AVX2" in (precision_obstacle(precision, cpu) or "")
        assert precision_obstacle("float32", cpu) is None
        assert best_cpu_precision() in ("float32", "bfloat16")
    finally:
        kernel_obstacle.cache_clear()


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def works() -> bool:
    values = torch.linspace(-5, 5, 64)
    return torch.allclose(run(Kernel(FIELDS, exponentials), values, 1), values.exp())


def test_code_is_compiled_once_and_kept(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert works()
    (file,) = kept.iterdir()
    before = file.read_bytes()
    monkeypatch.setattr(native.binding, "create_pass_builder", lambda *_: pytest.fail("compiled again"))
    assert works()
    assert [(file.name, file.read_bytes()) for file in kept.iterdir()] == [(file.name, before)]


@pytest.mark.parametrize("left", [b"", b"\n", b"not code", b"0" * 64 + b"\nnot code", None])
def test_a_broken_file_is_made_again(kept: Path, left: bytes | None) -> None:
    assert works()
    (file,) = kept.iterdir()
    before = file.read_bytes()
    file.write_bytes(before[:-1] if left is None else left)
    assert works()
    assert file.read_bytes() == before


def test_where_nothing_can_be_kept_code_is_made_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "file"))
    assert works()


def test_other_code_has_another_name(kept: Path) -> None:
    def ones(build: Builder, call: dict[str, Any], thread: Any, threads: Any) -> None:
        build.write(build.number(1.0), call["target"], build.long(0), FLOAT)

    assert works()
    assert run(Kernel(FIELDS, ones), torch.zeros(3), 1).tolist() == [1.0, 0.0, 0.0]
    assert len([*kept.iterdir()]) == 2


@pytest.mark.process
def test_without_llvmlite_the_lean_forward_runs_in_float32() -> None:
    """As beside a card, where nothing else needs it."""
    program = """
import sys
sys.modules["llvmlite"] = None
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from specdemo.models.lean import LeanLM
from specdemo.models.linear import precision_obstacle
config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).eval()
lm = LeanLM.from_transformers(model, "tiny")
ids = torch.arange(9)
assert torch.allclose(lm.open(9).extend(ids, keep=9), model(input_ids=ids[None]).logits[0], atol=1e-4)
assert lm.attend_few is None
print(precision_obstacle("int8", torch.device("cpu")))
"""
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert "the package llvmlite" in told.stdout
