"""A decoder for the Llama family with nothing in it that one sequence does not need.

Speculation pays when a forward costs what its weights' bytes cost, so everything else is kept small: queries, keys
and values come from one product and so do gate and up; keys and values are written into a buffer allocated before the
run; a rotation is one multiplication; logits are made only where asked. What can be done once is done to the weights
at loading: rows are reordered so that no activation is ever transposed (see `_Layer`), and on the CPU a norm's gain
is folded into the product behind it where the precision has room for that.

Work per forward does not grow with the context, except in attention itself.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .linear import Linear, activation_dtype, pack_linear, precision_obstacle
from .rope import Rope, pair_up, rope_obstacle

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Architectures by transformers' `model_type`. Their tensors have the same names; what one has and another has not
(biases, norms of queries and keys, layers without rotation) is read from the configuration and the tensors."""

_PREFILL_CHUNK = 512
_CAPACITY_STEP = 256
"""Buffers are allocated in multiples of this, so that runs of similar length share them."""


class LeanLM:
    """`LanguageModel` over packed weights.

    `state` maps transformers' parameter names to tensors on one device, and is emptied while the weights are packed, so
    that a caller who keeps no other reference never holds them twice. `lm_head.weight` may have any number of rows;
    without it the embedding serves (tied weights). `config` is the transformers configuration. Raises ValueError when
    the model is not of a known family or the state holds a tensor that has no place.
    """

    def __init__(
        self,
        config: Any,
        state: dict[str, Tensor],
        name: str,
        precision: str = "float32",
        vocab_size: int | None = None,
        vocab_ids: Tensor | None = None,
    ) -> None:
        self.embedding = state.pop("model.embed_tokens.weight")  # [rows, hidden], in the dtype it was loaded in
        self.device = self.embedding.device
        if obstacle := self.supports(config) or precision_obstacle(precision, self.device):
            raise ValueError(f"{name}: {obstacle}")
        head = state.pop("lm_head.weight", self.embedding)
        self.name = name
        self.precision = precision
        self.forward_path = "lean"
        self.dtype = activation_dtype(precision, self.device)
        self.vocab_size = min(vocab_size or head.shape[0], head.shape[0])
        self.vocab_ids = vocab_ids
        self.context_length = _context_length(config)
        self.rope = Rope(config, self.device, self.dtype)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.groups = int(config.num_attention_heads) // self.num_kv_heads
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.layers = [_Layer(self, config, index, state) for index in range(config.num_hidden_layers)]
        self.norm, gain = self.make_norm(state.pop("model.norm.weight"), config.rms_norm_eps)
        self.head = pack_linear(_scaled(head[: self.vocab_size], gain), None, precision)
        if state:
            raise ValueError(f"{name}: the lean forward has no place for {', '.join(sorted(state)[:3])}")
        self._pool: list[_Buffers] = []

    @classmethod
    def from_transformers(
        cls,
        model: Any,
        name: str,
        precision: str = "float32",
        vocab_size: int | None = None,
        release: bool = False,
    ) -> LeanLM:
        """Pack the weights of a loaded causal language model. `release` empties the model as it goes."""
        state = dict(model.state_dict())
        if getattr(model.config, "tie_word_embeddings", False):
            state.pop("lm_head.weight", None)
        if release:
            model.to("meta")
        return cls(model.config, state, name, precision, vocab_size)

    @staticmethod
    def supports(config: Any) -> str | None:
        """Why a model with this transformers configuration is not taken, or None if it is."""
        if config.model_type not in FAMILIES:
            return str(config.model_type)
        if config.hidden_act not in ("silu", "swish"):
            return f"{config.model_type} with {config.hidden_act}"
        if getattr(config, "quantization_config", None) is not None:
            return f"{config.model_type}, quantized"
        if obstacle := rope_obstacle(config):
            return f"{config.model_type} with {obstacle}"
        return None

    def open(self, capacity: int) -> LeanCache:
        if not 1 <= capacity <= self.context_length:
            raise ValueError(f"a cache of {capacity} positions: {self.name} takes 1 to {self.context_length}")
        for index, buffers in enumerate(self._pool):
            if buffers.positions >= capacity:
                return LeanCache(self, capacity, self._pool.pop(index))
        self._pool.clear()  # all are too small by now
        positions = math.ceil(capacity / _CAPACITY_STEP) * _CAPACITY_STEP
        self.rope.reach(positions)  # the buffers may serve a longer run later
        return LeanCache(self, capacity, _Buffers(self, positions))

    def give_back(self, buffers: _Buffers) -> None:
        """A closed cache's buffers, for the next run."""
        self._pool.append(buffers)

    def forward(self, ids: Tensor, start: int, buffers: _Buffers, mask: Tensor | None) -> Tensor:
        """Hidden states [n, hidden] after the last layer and norm, for `ids` int64 [n] at positions start, ..."""
        rows = functional.embedding(ids, self.embedding).to(self.dtype)
        rotations = self.rope.between(start, start + ids.shape[0])
        for layer, slots, keys, values in zip(self.layers, buffers.slots, buffers.keys, buffers.values, strict=True):
            layer(rows, rotations, start, slots, keys, values, mask)
        return self.norm(rows)

    def make_norm(self, gain: Tensor, eps: float) -> tuple[_Norm, Tensor | None]:
        """A norm, and the gain that is left for the product behind it (None where the norm applies it)."""
        if self.device.type == "cpu" and self.precision in ("float32", "float16"):
            return _Norm(None, gain.shape[0], eps), gain.float()
        return _Norm(gain.to(self.dtype), gain.shape[0], eps), None


class LeanCache:
    """`CachedLM` over a `LeanLM` and buffers of its own while it is open."""

    def __init__(self, lm: LeanLM, capacity: int, buffers: _Buffers) -> None:
        self._lm = lm
        self._capacity = capacity
        self._buffers: _Buffers | None = buffers
        self._cached = 0

    @property
    def cached(self) -> int:
        return self._cached

    @torch.inference_mode()
    def extend(self, ids: Tensor, keep: int) -> Tensor:
        count = ids.shape[0]
        if self._buffers is None:
            raise ValueError("the cache is closed")
        if self._cached + count > self._capacity:
            raise ValueError(f"{self._cached} + {count} positions are more than the cache's {self._capacity}")
        ids = ids.to(self._lm.device)
        last: list[Tensor] = []
        for chunk in ids.split(_PREFILL_CHUNK):
            mask = self._buffers.causal_mask(self._cached, chunk.shape[0])
            last.append(self._lm.forward(chunk, self._cached, self._buffers, mask))
            self._cached += chunk.shape[0]
        hidden = last[0] if len(last) == 1 else torch.cat(last)
        logits: Tensor = self._lm.head(hidden[-keep:]).float()
        return logits

    def truncate(self, length: int) -> None:
        self._cached = min(self._cached, length)

    def close(self) -> None:
        if self._buffers is not None:
            self._lm.give_back(self._buffers)
            self._buffers = None
        self._cached = 0


class _Buffers:
    """Keys and values of every layer for a number of positions, with the views that the layers need made once.

    slots[layer]: [positions, 2, kv_heads, head_dim], written at a position; keys[layer], values[layer]:
    [1, kv_heads, positions, head_dim], read by attention.
    """

    def __init__(self, lm: LeanLM, positions: int) -> None:
        shape = (len(lm.layers), positions, 2, lm.num_kv_heads, lm.head_dim)
        self.positions = positions
        self.slots = list(torch.zeros(shape, device=lm.device, dtype=lm.dtype))
        self.keys = [slots[:, 0].transpose(0, 1)[None] for slots in self.slots]
        self.values = [slots[:, 1].transpose(0, 1)[None] for slots in self.slots]
        self._groups = lm.groups
        self._masks: dict[int, Tensor] = {}

    def causal_mask(self, start: int, count: int) -> Tensor | None:
        """0 or -inf to add to scores [queries, start + count], or None where every query sees all of it.

        Rows are as `_Layer` has its queries: for few positions `groups` equal rows per position. The mask of a small
        count is a window of a wide one that is made once: zeros to the left, the triangle at the right end.
        """
        if count == 1:
            return None
        if not _folded(count, self._groups):
            return self._triangle(start, count)
        if count not in self._masks:
            wide = self._triangle(self.positions, count)
            self._masks[count] = wide.repeat_interleave(self._groups, 0)
        return self._masks[count][:, self.positions - start :]

    def _triangle(self, start: int, count: int) -> Tensor:
        like = self.slots[0]
        mask = torch.full((count, start + count), -math.inf, device=like.device, dtype=like.dtype)
        return mask.triu_(start + 1)


class _Layer:
    """One decoder layer; `rows` [n, hidden] is the residual stream and is changed in place.

    Queries, keys and values lie side by side as [n, groups + 2, kv_heads, head_dim]: first the queries, those that
    share a key head being `kv_heads` apart, then keys, then values. In that order n positions with `groups` queries
    each are [n * groups] queries for every key head, attention's output is the input of the output product, and
    keys and values enter the cache by one copy.
    """

    def __init__(self, lm: LeanLM, config: Any, index: int, state: dict[str, Tensor]) -> None:
        prefix = f"model.layers.{index}."
        self._heads = (lm.groups, lm.num_kv_heads, lm.head_dim)
        self._groups = lm.groups
        self._rotated = (lm.groups + 1) * lm.num_kv_heads
        self._width = lm.groups * lm.num_kv_heads * lm.head_dim
        no_rope = getattr(config, "no_rope_layers", None)  # SmolLM3: 0 where a layer does not rotate
        self._rope = lm.rope if no_rope is None or no_rope[index] else None

        def take(name: str) -> Tensor:
            return state.pop(prefix + name)

        def projection(name: str) -> tuple[Tensor, Tensor | None]:
            return take(f"{name}.weight"), state.pop(f"{prefix}{name}.bias", None)

        def fused(parts: list[tuple[Tensor, Tensor | None]], gain: Tensor | None) -> Linear:
            weight = torch.cat([weight for weight, _ in parts])
            biases = [torch.zeros_like(weight[:, 0]) if bias is None else bias for weight, bias in parts]
            has_bias = any(bias is not None for _, bias in parts)
            return pack_linear(_scaled(weight, gain), torch.cat(biases) if has_bias else None, lm.precision)

        self._attention_norm, gain = lm.make_norm(take("input_layernorm.weight"), config.rms_norm_eps)
        query, key, value = (projection(f"self_attn.{letter}_proj") for letter in "qkv")
        query = _mapped(query, lambda tensor: self._by_group(pair_up(tensor, lm.head_dim)))
        key = _mapped(key, lambda tensor: pair_up(tensor, lm.head_dim))
        self._qkv = fused([query, key, value], gain)
        self._query_key_gain: Tensor | None = None
        if f"{prefix}self_attn.q_norm.weight" in state:
            gains = [pair_up(take(f"self_attn.{letter}_norm.weight"), lm.head_dim) for letter in "qk"]
            repeated = [gains[0].repeat(lm.groups * lm.num_kv_heads, 1), gains[1].repeat(lm.num_kv_heads, 1)]
            self._query_key_gain = torch.cat(repeated).to(lm.dtype)
        self._eps = float(config.rms_norm_eps)
        weight, bias = projection("self_attn.o_proj")
        self._output = pack_linear(self._by_group(weight.t()).t(), bias, lm.precision)

        self._mlp_norm, gain = lm.make_norm(take("post_attention_layernorm.weight"), config.rms_norm_eps)
        self._gate_up = fused([projection("mlp.gate_proj"), projection("mlp.up_proj")], gain)
        self._down = pack_linear(*projection("mlp.down_proj"), lm.precision)

    def __call__(
        self,
        rows: Tensor,
        rotations: Tensor,
        start: int,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
    ) -> None:
        count = rows.shape[0]
        groups, kv_heads, head_dim = self._heads
        qkv = self._qkv(self._attention_norm(rows)).view(count, groups + 2, kv_heads, head_dim)
        rotated = qkv.view(count, -1, head_dim).narrow(1, 0, self._rotated)
        if self._query_key_gain is not None:
            normed = functional.rms_norm(rotated, (head_dim,), None, self._eps)
            torch.mul(normed, self._query_key_gain, out=rotated)
        if self._rope is not None:
            self._rope.rotate_(rotated, rotations)
        slots.narrow(0, start, count).copy_(qkv.narrow(1, groups, 2))
        stop = start + count
        attended = _attend(qkv.narrow(1, 0, groups), keys.narrow(2, 0, stop), values.narrow(2, 0, stop), mask)
        rows.add_(self._output(attended))
        gate, up = self._gate_up(self._mlp_norm(rows)).chunk(2, 1)
        rows.add_(self._down(functional.silu(gate).mul_(up)))

    def _by_group(self, tensor: Tensor) -> Tensor:
        """[heads * head_dim, ...] with heads by key head and then group -> by group and then key head."""
        groups, kv_heads, head_dim = self._heads
        shaped = tensor.reshape(kv_heads, groups, head_dim, *tensor.shape[1:])
        return shaped.transpose(0, 1).reshape(tensor.shape)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """queries [n, groups, kv_heads, head_dim], keys, values [1, kv_heads, length, head_dim] -> [n, heads * head_dim].

    Few positions: the queries that share a key head are one block of rows, so each key is read once. Many: a copy of
    the block would cost more than that saves, and `groups` becomes the batch instead.
    """
    count, groups, kv_heads, head_dim = queries.shape
    if _folded(count, groups):
        folded = queries.reshape(1, count * groups, kv_heads, head_dim).transpose(1, 2)
        attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        return attended.transpose(1, 2).reshape(count, -1)
    batched = queries.permute(1, 2, 0, 3)
    keys, values = keys.expand(groups, -1, -1, -1), values.expand(groups, -1, -1, -1)
    attended = functional.scaled_dot_product_attention(batched, keys, values, attn_mask=mask)
    return attended.permute(2, 0, 1, 3).reshape(count, -1)


def _folded(count: int, groups: int) -> bool:
    return count == 1 or count * groups <= 128


class _Norm:
    """Root mean square norm over the last dimension, times a gain unless that was folded into the next product."""

    def __init__(self, gain: Tensor | None, width: int, eps: float) -> None:
        self._gain = gain
        self._shape = (width,)
        self._eps = float(eps)
        self._root_width = math.sqrt(width)
        self._floor = torch.tensor(math.sqrt(eps * width))

    def __call__(self, rows: Tensor) -> Tensor:
        if rows.device.type != "cpu" or rows.dtype != torch.float32:
            return functional.rms_norm(rows, self._shape, self._gain, self._eps)
        # Four small kernels where rms_norm takes eight on a CPU: x / sqrt(mean(x^2) + eps) is
        # sqrt(width) * x / hypot(|x|, sqrt(eps * width)).
        length = torch.linalg.vector_norm(rows, 2, 1, True)
        normed = rows / length.hypot_(self._floor).div_(self._root_width)
        return normed if self._gain is None else normed.mul_(self._gain)


def _context_length(config: Any) -> int:
    """Positions the lean forward may be used for: with a sliding window, as long as nothing has slid out of it."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    length = int(config.max_position_embeddings)
    return length if window is None else min(length, int(window))


def _scaled(weight: Tensor, gain: Tensor | None) -> Tensor:
    return weight if gain is None else weight.float() * gain


def _mapped(projection: tuple[Tensor, Tensor | None], change: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = projection
    return change(weight), None if bias is None else change(bias)
