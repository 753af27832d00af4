"""A decoder for the Llama family with nothing in it that one sequence does not need.

Speculation pays when a forward costs what its weights' bytes cost, so everything else is kept small: queries, keys
and values come from one product and so do gate and up; keys and values are written into a buffer allocated before the
run; a rotation is one multiplication; logits are made only where asked. What can be done once is done to the weights
at loading: rows are reordered so that no activation is ever transposed (see `_Layer`), and on the CPU a norm's gain
is folded into the product behind it where the precision has room for that. In int8 the residual stream is kept in a
rotated basis (`rotation`), which its writers and readers absorb: outliers would spoil 8-bit rounding.

Work per forward does not grow with the context, except in attention itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .linear import Linear, activation_dtype, pack_linear, precision_obstacle
from .rope import Rope, pair_up, rope_obstacle
from .rotation import rotate

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
        self.rotated = precision == "int8"
        self.vocab_size = min(vocab_size or head.shape[0], head.shape[0])
        self.vocab_ids = vocab_ids
        self.context_length = _context_length(config)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.groups = int(config.num_attention_heads) // self.num_kv_heads
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        rotated_heads = (self.groups + 1) * self.num_kv_heads  # queries and keys; values do not rotate
        self.rope = Rope(config, rotated_heads, self.num_kv_heads, self.device, self.dtype)
        self.layers = [_Layer(self, config, index, state) for index in range(config.num_hidden_layers)]
        self.norm, gain = self.make_norm(state.pop("model.norm.weight"), config.rms_norm_eps)
        self.head = pack_linear(self.reader(head[: self.vocab_size], gain), None, precision, "unit")
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
        if self.rotated:
            rows = rotate(rows)
        stop = start + ids.shape[0]
        rotations = self.rope.between(start, stop)
        for layer, slots, keys, values in zip(self.layers, *buffers.views(start, stop), strict=True):
            layer(rows, rotations, slots.copy_, keys, values, mask)
        return self.norm(rows)

    def make_norm(self, gain: Tensor, eps: float) -> tuple[Linear, Tensor | None]:
        """A norm, and the gain that is left for the product behind it (None where the norm applies it)."""
        if self.device.type == "cpu" and self.dtype == torch.float32:
            return _unit_norm(gain.shape[0], eps), gain.float() * math.sqrt(gain.shape[0])
        gain = gain.to(self.dtype)
        return lambda rows: functional.rms_norm(rows, gain.shape, gain, eps), None

    def reader(self, weight: Tensor, gain: Tensor | None) -> Tensor:
        """`weight` [outputs, hidden] as it reads the normed residual stream."""
        weight = weight if gain is None else weight.float() * gain
        return rotate(weight) if self.rotated else weight

    def writer(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`weight` [hidden, inputs] and `bias` [hidden] as they write to the residual stream."""
        if not self.rotated:
            return weight, bias
        return rotate(weight.float().t()).t(), None if bias is None else rotate(bias.float())


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
    """Keys and values of every layer for a number of positions: [layers, positions, 2, kv_heads, head_dim]."""

    def __init__(self, lm: LeanLM, positions: int) -> None:
        shape = (len(lm.layers), positions, 2, lm.num_kv_heads, lm.head_dim)
        self.positions = positions
        self.keys_values = torch.zeros(shape, device=lm.device, dtype=lm.dtype)
        self._groups = lm.groups
        self._masks: dict[int, Tensor] = {}

    def views(self, start: int, stop: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Per layer: where positions start .. stop - 1 are written, [n, 2, kv_heads, head_dim], and the keys and the
        values of positions 0 .. stop - 1, [1, kv_heads, stop, head_dim]."""
        slots = self.keys_values[:, start:stop].unbind()
        keys, values = self.keys_values[:, None, :stop].permute(3, 0, 1, 4, 2, 5).unbind()
        return slots, keys.unbind(), values.unbind()

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
        like = self.keys_values
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
        self._shape = (lm.groups + 2, lm.num_kv_heads, lm.head_dim)
        self._head_dim = lm.head_dim
        self._parts = (lm.groups, 2)
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
            bias = torch.cat(biases) if has_bias else None
            return pack_linear(lm.reader(weight, gain), bias, lm.precision, "unit")

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
        self._output = pack_linear(*lm.writer(self._by_group(weight.t()).t(), bias), lm.precision)

        self._mlp_norm, gain = lm.make_norm(take("post_attention_layernorm.weight"), config.rms_norm_eps)
        self._gate_up = fused([projection("mlp.gate_proj"), projection("mlp.up_proj")], gain)
        self._down = pack_linear(*lm.writer(*projection("mlp.down_proj")), lm.precision, "outliers")

    def __call__(
        self,
        rows: Tensor,
        rotations: Tensor,
        write: Callable[[Tensor], object],
        keys: Tensor,
        values: Tensor,
        mask: Tensor | None,
    ) -> None:
        """`write` takes the new positions' keys and values [n, 2, kv_heads, head_dim] into the cache; `keys` and
        `values` [1, kv_heads, length, head_dim] are the cache with them."""
        qkv = self._qkv(self._attention_norm(rows))
        if self._query_key_gain is not None:
            heads = qkv.view(rows.shape[0], -1, self._head_dim).narrow(1, 0, len(self._query_key_gain))
            normed = functional.rms_norm(heads, (self._head_dim,), None, self._eps)
            torch.mul(normed, self._query_key_gain, out=heads)
        if self._rope is not None:
            self._rope.rotate_(qkv, rotations)
        queries, new = qkv.view(rows.shape[0], *self._shape).split_with_sizes(self._parts, 1)
        write(new)
        rows.add_(self._output(_attend(queries, keys, values, mask)))
        gate, up = self._gate_up(self._mlp_norm(rows)).chunk(2, 1)
        rows.add_(self._down(functional.silu(gate).mul_(up)))

    def _by_group(self, tensor: Tensor) -> Tensor:
        """[heads * head_dim, ...] with heads by key head and then group -> by group and then key head."""
        _, kv_heads, head_dim = self._shape
        shaped = tensor.reshape(kv_heads, -1, head_dim, *tensor.shape[1:])
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


def _unit_norm(width: int, eps: float) -> Linear:
    """Rows [n, width] to length 1, up to eps; times the gain and sqrt(width), left to the next product, that is the
    root mean square norm. x / sqrt(mean(x^2) + eps) = sqrt(width) * x / hypot(|x|, sqrt(eps * width)) takes three
    small kernels, where torch's rms_norm takes eight on a CPU."""
    floor = torch.tensor(math.sqrt(eps * width))
    return lambda rows: rows / torch.linalg.vector_norm(rows, 2, 1, True).hypot_(floor)


def _context_length(config: Any) -> int:
    """Positions the lean forward may be used for: with a sliding window, as long as nothing has slid out of it."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    length = int(config.max_position_embeddings)
    return length if window is None else min(length, int(window))


def _mapped(projection: tuple[Tensor, Tensor | None], change: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = projection
    return change(weight), None if bias is None else change(bias)
