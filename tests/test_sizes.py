"""Estimates against what is really there: tiny models loaded in each precision, and caches opened, within 5 %."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_folders import save_folder
from transformers import AutoConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from specdemo.models.held import weights_held
from specdemo.models.lean import LeanCache, LeanLM
from specdemo.models.loading import Keep, load_language_model
from specdemo.models.quantize import load_quantized
from specdemo.models.transformers_lm import TransformersLM
from specdemo.plan.shape import Weight, read_headers
from specdemo.plan.sizes import Kept, kv_bytes, weight_bytes, workspace_bytes
from specdemo.plan.sources import folder_shape

CPU = torch.device("cpu")
TOLERANCE = 0.05


def make(folder: Path, tied: bool, hidden: int = 512, layers: int = 6, vocab: int = 8192) -> Path:
    """A Llama of about 20 million numbers, stored in float32."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sizes") / "llama", tied=False)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "int8"])
def test_the_lean_forward_takes_what_was_planned(tmp_path: Path, tied: bool, precision: str) -> None:
    folder = make(tmp_path / "model", tied, hidden=256, layers=2, vocab=2048)
    lm = load_language_model(folder, "m", Keep(precision), CPU, 2048)
    assert isinstance(lm, LeanLM)
    compute = "bfloat16" if precision == "bfloat16" else "float32"
    planned = weight_bytes(folder_shape(folder, "m"), Kept(precision, "lean", compute))
    assert weights_held(lm) == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_bitsandbytes_takes_what_was_planned(llama: Path, kind: str) -> None:
    lm = load_quantized(llama, AutoConfig.from_pretrained(llama), "m", kind, "float32", CPU, 8192)
    assert isinstance(lm, TransformersLM)
    planned = weight_bytes(folder_shape(llama, "m"), Kept(kind, "bitsandbytes", "float32"))
    assert weights_held(lm) == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_transformers_takes_what_was_planned(tmp_path: Path, precision: str) -> None:
    config = GPT2Config(vocab_size=4096, n_positions=512, n_embd=256, n_layer=3, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    lm = load_language_model(tmp_path, "m", Keep(precision), CPU, 4096)
    assert isinstance(lm, TransformersLM)
    planned = weight_bytes(folder_shape(tmp_path, "m"), Kept(precision, "transformers", precision))
    assert weights_held(lm) == pytest.approx(planned, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("precision", "compute"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("int8", "float32")]
)
def test_a_lean_cache_is_as_large_as_planned(llama: Path, precision: str, compute: str) -> None:
    lm = load_language_model(llama, "m", Keep(precision), CPU, 8192)
    assert isinstance(lm, LeanLM)
    cache = lm.open(300)
    assert isinstance(cache, LeanCache)
    assert cache._buffers is not None
    held = cache._buffers.keys_values
    planned = kv_bytes(folder_shape(llama, "m"), Kept(precision, "lean", compute), 300)
    assert held.numel() * held.element_size() == planned


def test_a_cache_of_transformers_is_as_large_as_planned(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=96, n_positions=128, n_embd=64, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    lm = load_language_model(tmp_path, "m", Keep("float32"), CPU, 96)
    cache: Any = lm.open(100)
    cache.extend(torch.arange(90), keep=1)
    held = sum(t.numel() * t.element_size() for layer in cache._cache.layers for t in (layer.keys, layer.values))
    assert held == kv_bytes(folder_shape(tmp_path, "m"), Kept("float32", "transformers", "float32"), 90)


def test_headers_tell_the_weights_without_reading_them(tiny_target: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = save_folder(tiny_target, tmp_path / "tiny")
    weights, stored = read_headers(folder)
    assert stored == "float32"
    assert sum(weight.size for weight in weights) == sum(p.numel() for p in tiny_target.parameters())
    shape = folder_shape(folder, "tiny")
    assert (shape.layers, shape.kv_heads, shape.vocab, shape.tied, shape.lean) == (2, 2, 96, False, True)
    assert shape.of_kind("linear") == sum(p.numel() for name, p in tiny_target.named_parameters() if "_proj" in name)


@pytest.mark.parametrize(
    ("name", "dims", "kind", "module"),
    [
        ("model.layers.11.mlp.up_proj.weight", (8, 4), "linear", "model.layers.11"),
        ("h.3.attn.c_attn.weight", (8, 4), "linear", "h.3"),
        ("model.layers.0.input_layernorm.weight", (4,), "other", "model.layers.0"),
        ("model.embed_tokens.weight", (9, 4), "embedding", "model.embed_tokens"),
        ("lm_head.weight", (9, 4), "head", "lm_head"),
        ("vision_tower.encoder.layers.0.fc.weight", (9, 4), "other", "vision_tower.encoder.layers.0"),
    ],
)
def test_what_a_weight_is_follows_from_its_name(name: str, dims: tuple[int, ...], kind: str, module: str) -> None:
    weight = Weight(name, dims)
    assert (weight.kind, weight.module) == (kind, module)


def test_the_work_space_grows_with_the_context_and_with_recorded_graphs(llama: Path) -> None:
    shape = folder_shape(llama, "m")
    small = workspace_bytes(shape, Kept("bfloat16", "lean", "bfloat16", "cpu"), 512, caches=2)
    long = workspace_bytes(shape, Kept("bfloat16", "lean", "bfloat16", "cpu"), 4096, caches=2)
    graphs = workspace_bytes(shape, Kept("bfloat16", "lean", "bfloat16", "cuda"), 512, caches=2)
    assert small < long < 10 * small
    assert graphs > small
