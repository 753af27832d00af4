"""The lean forward is transformers' forward: same logits in float32, for every family it takes, however it is fed.

A wrong rotation, head order or mask shows in the logits of some model below: the models are random, so no part of
them is idle, and their head counts are odd.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from specdemo.environment import describe
from specdemo.models import lean
from specdemo.models.lean import LeanLM
from specdemo.models.lean_layer import attend_by_products
from specdemo.models.linear import best_cpu_precision, kernel_obstacle, pack_linear, pack_normed, precision_obstacle

CPU = torch.device("cpu")
VOCAB = 89
POSITIONS = 72


def _rope(kind: str, **more: float) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


_LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_YARN = {"factor": 4.0, "original_max_position_embeddings": 32}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-9-over-3-heads": ("Llama", {}),
    "llama-multi-head": ("Llama", {"num_attention_heads": 3, "hidden_size": 36, "num_key_value_heads": 3}),
    "llama-one-key-head": ("Llama", {"num_attention_heads": 5, "hidden_size": 50, "num_key_value_heads": 1}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-wide-heads": ("Llama", {"head_dim": 22}),
    "llama-linear-rope": ("Llama", {"rope_parameters": _rope("linear", factor=2.5)}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": _rope("llama3", **_LLAMA3)}),
    "llama-yarn-rope": ("Llama", {"rope_parameters": _rope("yarn", **_YARN)}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 10}),
    "mistral-window": ("Mistral", {"sliding_window": POSITIONS}),
    "qwen2-bias": ("Qwen2", {}),
    "qwen2-window-unused": ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen3-normed-heads": ("Qwen3", {"head_dim": 14}),
    "qwen3-normed-heads-and-bias": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "smollm3-unrotated-layers": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    # Heads of a multiple of eight features: few positions go through the kernel for them, see `few_queries`.
    "llama-heads-of-8": ("Llama", {"head_dim": 8}),
    "llama-heads-of-64-one-key-head": ("Llama", {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 1}),
    "llama-heads-of-16-biases-llama3-rope": (
        "Llama",
        {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "rope_parameters": _rope("llama3", **_LLAMA3)},
    ),
    "llama-heads-of-24-yarn-rope": ("Llama", {"head_dim": 24, "rope_parameters": _rope("yarn", **_YARN)}),
    "qwen2-heads-of-32": ("Qwen2", {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen3-normed-heads-of-128": ("Qwen3", {"head_dim": 128, "num_attention_heads": 6, "num_key_value_heads": 3}),
    "smollm3-unrotated-layers-heads-of-8": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "hidden_size": 72}),
}
EVEN = ("llama-heads-of-8", "llama-heads-of-64-one-key-head", "smollm3-unrotated-layers-heads-of-8")


def tiny(family: str, **changes: Any) -> Any:
    """A seeded random model of a family, in float32; norms' gains and biases are random too."""
    options: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 54,
        "intermediate_size": 70,
        "num_hidden_layers": 3,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{family}Config")(**(options | changes))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model


def some_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def reference(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """transformers' logits [n, vocab] for `ids` in one pass without a cache."""
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == theirs.shape
    assert torch.linalg.vector_norm(ours - theirs) < 1e-4 * torch.linalg.vector_norm(theirs)
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("case", MODELS)
def test_logits_are_transformers_logits(case: str) -> None:
    """Prefill, one position, six positions, rollback and other tokens in the place of those forgotten."""
    family, changes = MODELS[case]
    model = tiny(family, **changes)
    ids = some_ids(POSITIONS)
    expected = reference(model, ids)
    cache = LeanLM.from_transformers(model, case).open(POSITIONS)

    assert_close(cache.extend(ids[:50], keep=50), expected[:50])
    assert_close(cache.extend(ids[50:51], keep=1), expected[50:51])
    assert_close(cache.extend(ids[51:57], keep=6), expected[51:57])
    assert_close(
        cache.extend(some_ids(6, seed=2), keep=2), reference(model, torch.cat([ids[:57], some_ids(6, 2)]))[-2:]
    )
    cache.truncate(55)
    assert cache.cached == 55
    assert_close(cache.extend(ids[55:], keep=17), expected[55:])
    assert cache.cached == POSITIONS


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_greedy_answers_are_generates(family: str) -> None:
    model = tiny(family)
    prompt = some_ids(9)
    expected = model.generate(prompt[None], do_sample=False, max_new_tokens=40, eos_token_id=None)[0]
    cache = LeanLM.from_transformers(model, family).open(64)
    ids, feed = prompt, prompt
    for _ in range(40):
        feed = cache.extend(feed, keep=1).argmax(-1)
        ids = torch.cat([ids, feed])
    assert ids.tolist() == expected.tolist()


def test_long_prompts_are_fed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of odd sizes, on both sides of the width at which attention changes its form."""
    model = tiny("Llama")
    ids = some_ids(120)
    expected = reference(model, ids)
    lm = LeanLM.from_transformers(model, "chunked")
    for chunk in (1, 7, 50, 119):
        monkeypatch.setattr(lean, "_PREFILL_CHUNK", chunk)
        cache = lm.open(120)
        assert_close(cache.extend(ids, keep=70), expected[-70:])
        cache.close()


def test_two_open_caches_do_not_share_positions_and_closed_ones_are_used_again() -> None:
    model = tiny("Llama")
    lm = LeanLM.from_transformers(model, "pool")
    one, other = some_ids(40, 1), some_ids(40, 2)
    first, second = lm.open(40), lm.open(40)
    for start in (0, 20):  # in turns, as two lanes do
        got_first = first.extend(one[start : start + 20], keep=20)
        got_second = second.extend(other[start : start + 20], keep=20)
    assert_close(got_first, reference(model, one)[20:])
    assert_close(got_second, reference(model, other)[20:])
    buffers = first._buffers
    first.close()
    first.close()
    third = lm.open(33)
    assert third._buffers is buffers
    assert third.cached == 0
    assert_close(third.extend(other[:33], keep=33), reference(model, other[:33]))
    with pytest.raises(ValueError, match="closed"):
        first.extend(one, keep=1)


def test_vocabulary_is_cut_and_a_head_may_have_fewer_rows_than_the_embedding() -> None:
    model = tiny("Llama", tie_word_embeddings=True)
    ids = some_ids(12)
    expected = reference(model, ids)
    cut = LeanLM.from_transformers(model, "cut", vocab_size=80)
    assert cut.vocab_size == 80
    assert_close(cut.open(12).extend(ids, keep=12), expected[:, :80])

    rows = torch.tensor([3, 14, 15, 9, 2, 6])
    state = {key: value for key, value in model.state_dict().items() if key != "lm_head.weight"}
    state["model.embed_tokens.weight"] = cut.embedding  # shared, not copied
    state["lm_head.weight"] = cut.embedding[rows]
    small = LeanLM(model.config, state, "small head", vocab_ids=rows)
    assert small.embedding.data_ptr() == cut.embedding.data_ptr()
    assert small.vocab_size == 6
    assert_close(small.open(12).extend(ids, keep=12), expected[:, rows])


def test_capacity_is_kept() -> None:
    model = tiny("Mistral", sliding_window=60)
    lm = LeanLM.from_transformers(model, "window")
    assert lm.context_length == 60  # from the next position on, the first would have slid out of the window
    with pytest.raises(ValueError, match="61"):
        lm.open(61)
    with pytest.raises(ValueError, match="0"):
        lm.open(0)
    cache = lm.open(20)
    cache.extend(some_ids(18), keep=1)
    with pytest.raises(ValueError, match="18 \\+ 3"):
        cache.extend(some_ids(3), keep=1)
    assert cache.cached == 18
    cache.truncate(30)
    assert cache.cached == 18
    cache.extend(some_ids(2), keep=1)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("GPT2", {}, "gpt2"),
        ("Gemma", {}, "gemma"),
        ("Qwen3Moe", {}, "qwen3_moe"),
        ("Llama", {"hidden_act": "gelu"}, "gelu"),
        ("Llama", {"rope_parameters": _rope("dynamic", factor=2.0)}, "dynamic"),
        ("Qwen3", {"rope_parameters": _rope("default", partial_rotary_factor=0.5)}, "part of each head"),
        ("Llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized"),
    ],
)
def test_what_is_not_known_is_refused_with_a_reason(family: str, changes: dict[str, Any], reason: str) -> None:
    config = getattr(transformers, f"{family}Config")(**changes)
    assert reason in (LeanLM.supports(config) or "")
    with pytest.raises(ValueError, match=reason):
        LeanLM(config, {"model.embed_tokens.weight": torch.zeros(4, 4)}, "unknown")


def test_supported_configurations_have_no_obstacle() -> None:
    for family, changes in MODELS.values():
        assert LeanLM.supports(tiny(family, **changes).config) is None


def test_a_tensor_without_a_place_is_an_error() -> None:
    """A family grows a new part under its old name: better no answer than a wrong one."""
    model = tiny("Llama")
    state = dict(model.state_dict())
    state["model.layers.1.self_attn.sinks"] = torch.zeros(9)
    with pytest.raises(ValueError, match="sinks"):
        LeanLM(model.config, state, "grown")


def test_released_models_hold_no_weights() -> None:
    model, kept = tiny("Llama"), tiny("Llama")
    lm = LeanLM.from_transformers(model, "released", release=True)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_close(lm.open(9).extend(some_ids(9), keep=9), reference(kept, some_ids(9)))


@pytest.mark.parametrize(("precision", "tolerance"), [("float16", 5e-3), ("bfloat16", 5e-2), ("int8", 8e-2)])
@pytest.mark.parametrize("case", ["llama-9-over-3-heads", "llama-biases", "qwen2-bias", "qwen3-normed-heads", *EVEN])
def test_other_precisions_round_and_no_more(case: str, precision: str, tolerance: float) -> None:
    if obstacle := precision_obstacle(precision, CPU):
        pytest.skip(obstacle)
    family, changes = MODELS[case]
    model = tiny(family, **changes)
    ids = some_ids(60)
    expected = reference(model, ids)
    lm = LeanLM.from_transformers(model, case, precision)
    assert lm.precision == precision
    cache = lm.open(60)
    ours = torch.cat(
        [cache.extend(ids[:50], keep=50), cache.extend(ids[50:51], keep=1), cache.extend(ids[51:], keep=9)]
    )
    distance = torch.linalg.vector_norm(ours - expected) / torch.linalg.vector_norm(expected)
    assert distance < tolerance


@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 54), (96, 31), (128, 256)])
def test_a_row_does_not_depend_on_its_neighbours(precision: str, normed: bool, outputs: int, inputs: int) -> None:
    """Bit for bit: among other rows, whatever they hold, and for any number of rows."""
    if obstacle := precision_obstacle(precision, CPU):
        pytest.skip(obstacle)
    generator = torch.Generator().manual_seed(3)
    weight, rows = torch.randn(outputs, inputs, generator=generator), torch.randn(17, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    if normed:
        linear = pack_normed(weight, bias, precision, torch.rand(inputs, generator=generator), 1e-5)
    else:
        linear = pack_linear(weight, bias, precision)
    together = linear(rows)
    for index in range(17):
        company = 1e3 * torch.randn(17, inputs, generator=generator)
        company[index] = rows[index]
        assert torch.equal(linear(company)[index], together[index])
    for count in range(1, 18):
        assert torch.equal(linear(rows[:count]), together[:count])
        assert torch.equal(linear(rows[count - 1 : count]), together[count - 1 : count])


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize(("outputs", "inputs"), [(70, 54), (96, 31), (128, 256)])
def test_what_stands_around_a_product_is_computed_with_it(precision: str, outputs: int, inputs: int) -> None:
    """The norm in front, a gate in front, the residual stream behind; with a bias and without."""
    if obstacle := precision_obstacle(precision, CPU):
        pytest.skip(obstacle)
    generator = torch.Generator().manual_seed(5)
    weight, rows = (torch.randn(size, inputs, generator=generator) for size in (outputs, 9))
    gain, gate, up = (torch.randn(size, generator=generator) for size in (inputs, (9, inputs), (9, inputs)))
    residual, dtype = torch.randn(9, outputs, generator=generator), lean.activation_dtype(precision, CPU)
    tolerance = {"float32": 1e-5, "float16": 1e-3}.get(precision, 2e-2)

    def near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
        assert torch.linalg.vector_norm(ours - theirs) < tolerance * torch.linalg.vector_norm(theirs)

    for bias in (None, torch.randn(outputs, generator=generator)):
        shift = torch.zeros(outputs) if bias is None else bias
        normed = rows * (rows.square().mean(1, keepdim=True) + 1e-5).rsqrt() * gain
        linear = pack_linear(weight, bias, precision)
        near(linear(rows.to(dtype)).float(), rows @ weight.T + shift)
        near(pack_normed(weight, bias, precision, gain, 1e-5)(rows.to(dtype)).float(), normed @ weight.T + shift)
        stream = residual.to(dtype, copy=True)
        linear.add_to(stream, rows.to(dtype))
        near(stream.float(), residual + rows @ weight.T + shift)
        stream = residual.to(dtype, copy=True)
        linear.add_gated_to(stream, torch.cat([gate, up], 1).to(dtype))
        near(stream.float(), residual + (gate.sigmoid() * gate * up) @ weight.T + shift)


def test_weights_beyond_float16_are_refused() -> None:
    if obstacle := precision_obstacle("float16", CPU):
        pytest.skip(obstacle)
    for value in (7e4, -7e4, math.nan, math.inf):
        weight = torch.ones(16, 16)
        weight[3, 4] = value
        with pytest.raises(ValueError, match="float16's range"):
            pack_linear(weight, None, "float16")


def test_drafts_after_a_position_do_not_change_it_in_int8() -> None:
    """The whole model: the logits at a position are the same bits whatever is drafted behind it."""
    if obstacle := precision_obstacle("int8", CPU):
        pytest.skip(obstacle)
    cache = LeanLM.from_transformers(tiny("Llama"), "int8", "int8").open(60)
    ids = some_ids(46)
    cache.extend(ids[:40], keep=1)
    expected = cache.extend(ids[40:], keep=6).clone()
    for kept in range(1, 6):
        cache.truncate(40)
        other = torch.cat([ids[40 : 40 + kept], some_ids(6 - kept, seed=kept + 7)])
        assert torch.equal(cache.extend(other, keep=6)[:kept], expected[:kept])


@pytest.mark.parametrize("precision", ["float16", "int8"])
@pytest.mark.parametrize("case", EVEN)
def test_few_positions_have_the_same_bits_however_many_are_fed(case: str, precision: str) -> None:
    """Around the ends of attention's blocks too, with every width that a draft may have.

    Against rounding a last bit counts: where it crosses a step, logits differ as if by noise.
    """
    if obstacle := precision_obstacle(precision, CPU):
        pytest.skip(obstacle)
    family, changes = MODELS[case]
    lm = LeanLM.from_transformers(tiny(family, **(changes | {"max_position_embeddings": 700})), case, precision)
    assert lm.attend_few is not None
    ids = some_ids(700)
    for start in (3, 57, 186, 251, 314, 507, 636):
        cache = lm.open(700)
        cache.extend(ids[:start], keep=1)
        one_by_one = torch.cat([cache.extend(ids[at : at + 1], keep=1) for at in range(start, start + 18)])
        for count in (2, 3, 5, 6, 9, 17):
            cache.truncate(start)
            fed = torch.cat([cache.extend(part, keep=len(part)) for part in ids[start : start + 18].split(count)])
            assert torch.equal(fed, one_by_one)
        cache.close()


def test_kernels_run_wherever_the_processor_has_avx2() -> None:
    """Or every test of them would be skipped unseen."""
    assert (kernel_obstacle() is None) == ("avx2" in describe(CPU)["processor_features"])


def test_the_kernel_for_few_positions_is_used_where_it_runs() -> None:
    if obstacle := kernel_obstacle():
        pytest.skip(obstacle)
    for case, precision, used in (
        ("llama-heads-of-8", "float32", True),
        ("llama-heads-of-8", "bfloat16", False),
        ("llama-9-over-3-heads", "float32", False),
    ):
        family, changes = MODELS[case]
        lm = LeanLM.from_transformers(tiny(family, **changes), case, precision)
        assert (lm.attend_few is not None) == used, case


def test_precisions_are_named_and_checked() -> None:
    assert "int4" in (precision_obstacle("int4", CPU) or "")
    assert "int8" in (precision_obstacle("int8", torch.device("cuda")) or "")
    assert precision_obstacle("float32", CPU) is None
    assert precision_obstacle(best_cpu_precision(), CPU) is None


@pytest.mark.embedded
def test_embedded_model_reads_text_as_transformers_does(embedded_folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded_folder)
    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32).eval()
    text = "The sea covers most of the Earth. Its water is salt, and the Moon pulls it to and fro. " * 4
    ids = torch.tensor(tokenizer(text)["input_ids"])
    expected = reference(model, ids)
    cache = LeanLM.from_transformers(model, "embedded").open(len(ids))
    ours = torch.cat(
        [cache.extend(ids[:-7], keep=len(ids) - 7), cache.extend(ids[-7:-6], 1), cache.extend(ids[-6:], 6)]
    )
    assert_close(ours, expected)
    assert ours.argmax(-1).tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("case", ["llama-9-over-3-heads", "llama-one-key-head", "qwen3-normed-heads"])
def test_forwards_of_fixed_shape_are_the_same(case: str) -> None:
    """What a CUDA graph records, step by step on the CPU: padded widths, positions as tensors, masks over the whole
    buffer, rollback over what padding has written, and buffers used again."""
    family, changes = MODELS[case]
    model = tiny(family, **changes)
    ids = some_ids(POSITIONS)
    expected = reference(model, ids)
    lm = LeanLM.from_transformers(model, case)
    lm.graphs = True
    for _ in range(2):
        cache = lm.open(POSITIONS)
        start = 0
        for count in (33, 1, 3, 1, 30):  # the first is wider than any graph
            kept = min(count, 2)
            assert_close(cache.extend(ids[start : start + count], keep=kept), expected[start + count - kept :][:kept])
            start += count
        cache.truncate(35)
        assert_close(cache.extend(ids[35:40], keep=5), expected[35:40])
        assert_close(cache.extend(ids[40:], keep=32), expected[40:])
        cache.close()


def test_a_graph_that_cannot_be_recorded_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("Llama")
    lm = LeanLM.from_transformers(model, "no graphs")
    lm.graphs = True

    def fail(self: object, ids: torch.Tensor, start: int) -> torch.Tensor:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    monkeypatch.setattr("specdemo.models.lean.StaticForward.__call__", fail)
    cache = lm.open(20)
    assert_close(cache.extend(some_ids(20)[:9], keep=9), reference(model, some_ids(20))[:9])
    assert lm.forward_path == "lean, eager (no CUDA graphs: operation not permitted)"
    assert_close(cache.extend(some_ids(20)[9:], keep=11), reference(model, some_ids(20))[9:])


def test_attention_by_products_is_attention() -> None:
    generator = torch.Generator().manual_seed(4)
    queries, keys, values = (torch.randn(3, rows, 10, generator=generator) for rows in (6, 17, 17))
    mask = torch.zeros(6, 17).masked_fill_(torch.rand(6, 17, generator=generator) < 0.4, -torch.inf)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    assert torch.allclose(attend_by_products(queries, keys, values, mask), expected, atol=1e-6)


def test_old_files_with_frequencies_or_a_second_copy_of_tied_weights() -> None:
    model = tiny("Llama", tie_word_embeddings=True)
    state = dict(model.state_dict())
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(3)
    state["lm_head.weight"] = torch.zeros_like(state["lm_head.weight"])
    ids = some_ids(9)
    assert_close(LeanLM(model.config, state, "old").open(9).extend(ids, keep=9), reference(model, ids))
