"""One decoder layer of the Llama family, its weights reordered so that no activation is ever transposed.

Queries, keys and values come out of one product side by side, as [n, groups + 2, kv_heads, head_dim]: first the
queries, those that share a key head being `kv_heads` apart, then keys, then values. In that order n positions with
`groups` queries each are n * groups queries for every key head, attention's output is the input of the output
product, and keys and values enter the cache by one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .linear import Inputs, Linear
from .rope import Rope, pair_up

_FOLDED_QUERIES = 128


class Decoder(Protocol):
    """What layers, buffers and recorded forwards need of the model that they are parts of: see `lean.LeanLM`."""

    precision: str
    device: torch.device
    dtype: torch.dtype
    groups: int  # query heads that share a key head
    num_kv_heads: int
    head_dim: int
    even_attention: bool  # see `lean_buffers`
    rope: Rope
    layers: list[LeanLayer]
    norm: Linear
    head: Linear

    def embed(self, ids: Tensor) -> Tensor: ...

    def make_norm(self, gain: Tensor, eps: float) -> tuple[Linear, Tensor | None]: ...

    def reads_normed(self, weight: Tensor, gain: Tensor | None, bias: Tensor | None) -> Linear: ...

    def writes(self, weight: Tensor, bias: Tensor | None, inputs: Inputs = "plain") -> Linear: ...


class Reach(NamedTuple):
    """What some positions of a call, `number` from `first` on, read in one layer: keys and values, each
    [kv_heads, length, head_dim]. `mask` [queries, length] is added to the scores."""

    first: int
    number: int
    keys: Tensor
    values: Tensor
    mask: Tensor


class LeanLayer:
    """The weights of layer `index`, taken out of `state`; a call changes the residual stream in place."""

    def __init__(self, lm: Decoder, config: Any, index: int, state: dict[str, Tensor]) -> None:
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
            return lm.reads_normed(weight, gain, bias)

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
        self._output = lm.writes(self._by_group(weight.t()).t(), bias)

        self._mlp_norm, gain = lm.make_norm(take("post_attention_layernorm.weight"), config.rms_norm_eps)
        self._gate_up = fused([projection("mlp.gate_proj"), projection("mlp.up_proj")], gain)
        self._down = lm.writes(*projection("mlp.down_proj"), "outliers")

    def __call__(
        self, rows: Tensor, rotations: Tensor, write: Callable[[Tensor], object], reaches: Sequence[Reach]
    ) -> None:
        """`rows` [n, hidden] is the residual stream. `write` takes the new positions' keys and values
        [n, 2, kv_heads, head_dim] into the cache. `reaches`: what is read of it then, by which of the n positions."""
        queries, new = self.project(rows, rotations)
        write(new)
        if len(reaches) == 1:
            self.finish(rows, _attend(queries, reaches[0]))
        else:
            parts = [_attend(queries.narrow(0, reach.first, reach.number), reach) for reach in reaches]
            self.finish(rows, torch.cat(parts))

    def project(self, rows: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """What attention needs of the residual stream: queries [n, groups, kv_heads, head_dim], and keys and values
        [n, 2, kv_heads, head_dim]."""
        qkv = self._qkv(self._attention_norm(rows))
        if self._query_key_gain is not None:
            heads = qkv.view(rows.shape[0], -1, self._head_dim).narrow(1, 0, len(self._query_key_gain))
            normed = functional.rms_norm(heads, (self._head_dim,), None, self._eps)
            torch.mul(normed, self._query_key_gain, out=heads)
        if self._rope is not None:
            self._rope.rotate_(qkv, rotations)
        queries, new = qkv.view(rows.shape[0], *self._shape).split_with_sizes(self._parts, 1)
        return queries, new

    def finish(self, rows: Tensor, attended: Tensor) -> None:
        """Add to the residual stream what attention [n, heads * head_dim] and then the MLP make of it."""
        rows.add_(self._output(attended))
        gate, up = self._gate_up(self._mlp_norm(rows)).chunk(2, 1)
        rows.add_(self._down(functional.silu(gate).mul_(up)))

    def _by_group(self, tensor: Tensor) -> Tensor:
        """[heads * head_dim, ...] with heads by key head and then group -> by group and then key head."""
        _, kv_heads, head_dim = self._shape
        shaped = tensor.reshape(kv_heads, -1, head_dim, *tensor.shape[1:])
        return shaped.transpose(0, 1).reshape(tensor.shape)


def _attend(queries: Tensor, reach: Reach) -> Tensor:
    """queries [n, groups, kv_heads, head_dim] -> [n, heads * head_dim].

    Few positions: the queries that share a key head are one block of rows, so each key is read once. Many: a copy of
    the block would cost more than that saves, and `groups` becomes the batch instead.
    """
    count, groups, kv_heads, head_dim = queries.shape
    _, _, keys, values, mask = reach
    if not folded(count, groups):
        keys, values = keys.expand(groups, -1, -1, -1), values.expand(groups, -1, -1, -1)
        attended = functional.scaled_dot_product_attention(queries.permute(1, 2, 0, 3), keys, values, attn_mask=mask)
        return attended.permute(2, 0, 1, 3).reshape(count, -1)
    rows = count * groups
    block = queries.reshape(rows, kv_heads, head_dim)
    if len(mask) > rows:
        block = functional.pad(block, (0, 0, 0, 0, 0, len(mask) - rows))
    if block.dtype == torch.float32 or block.is_cuda:
        attended = attend_by_products(block.transpose(0, 1), keys, values, mask)
    else:
        attended = functional.scaled_dot_product_attention(block.transpose(0, 1), keys, values, attn_mask=mask)
    if len(mask) > rows:
        attended = attended.narrow(1, 0, rows)
    return attended.transpose(0, 1).reshape(count, -1)


def attend_by_products(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Attention as two products and a softmax: queries [kv_heads, rows, head_dim], the rest as in `Reach`.

    For few queries the fused kernels are slower: on a CPU they prepare for long sequences, and on a card those that
    take a mask give each head to one of its many processors. In 16 bits on a CPU scores would lose too much.
    """
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[2] ** -0.5)
    return torch.bmm(scores.softmax(2), values)


def folded(count: int, groups: int) -> bool:
    """Whether `count` positions are few enough for their queries to be one block of rows per key head."""
    return count == 1 or count * groups <= _FOLDED_QUERIES


def unit_norm(width: int, eps: float) -> Linear:
    """Rows [n, width] to length 1, up to eps; times the gain and sqrt(width), left to the next product, that is the
    root mean square norm. x / sqrt(mean(x^2) + eps) = sqrt(width) * x / hypot(|x|, sqrt(eps * width)) takes three
    small kernels, where torch's rms_norm takes eight on a CPU."""
    floor = torch.tensor(math.sqrt(eps * width))
    return lambda rows: rows / torch.linalg.vector_norm(rows, 2, 1, True).hypot_(floor)


def _mapped(projection: tuple[Tensor, Tensor | None], change: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = projection
    return change(weight), None if bias is None else change(bias)
