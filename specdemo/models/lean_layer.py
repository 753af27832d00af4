"""One decoder layer of the Llama family, its weights reordered so that no activation is ever transposed.

Queries, keys and values come out of one product side by side, as [n, groups + 2, kv_heads, head_dim]: first the
queries, those that share a key head being `kv_heads` apart, then keys, then values. In that order n positions with
`groups` queries each are n * groups queries for every key head, attention's output is the input of the output
product, and keys and values enter the cache by one copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .linear import Linear, pack_linear, pack_normed
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
    rope: Rope
    attend_few: Callable[..., Tensor] | None  # see `few_queries`
    layers: list[LeanLayer]
    head: Linear  # and the norm before it

    def embed(self, ids: Tensor) -> Tensor: ...


class Reach(NamedTuple):
    """What positions read in one layer: keys and values, each [kv_heads, length, head_dim]. `mask` [queries, length] is
    added to the scores."""

    keys: Tensor
    values: Tensor
    mask: Tensor


class LeanLayer:
    """The weights of layer `index`, taken out of `state`; a call changes the residual stream in place."""

    def __init__(self, lm: Decoder, config: Any, index: int, state: dict[str, Tensor]) -> None:
        prefix = f"model.layers.{index}."
        self._shape = (lm.groups + 2, lm.num_kv_heads, lm.head_dim)
        self._head_dim = lm.head_dim
        self._attend_few = lm.attend_few
        self._parts = (lm.groups, 2)
        no_rope = getattr(config, "no_rope_layers", None)  # SmolLM3: 0 where a layer does not rotate
        self._rope = lm.rope if no_rope is None or no_rope[index] else None

        def take(name: str) -> Tensor:
            return state.pop(prefix + name)

        def projection(name: str) -> tuple[Tensor, Tensor | None]:
            return take(f"{name}.weight"), state.pop(f"{prefix}{name}.bias", None)

        def fused(parts: list[tuple[Tensor, Tensor | None]], norm: str) -> Linear:
            """One product for all parts, behind a norm."""
            weight = torch.cat([weight for weight, _ in parts])
            biases = [torch.zeros_like(weight[:, 0]) if bias is None else bias for weight, bias in parts]
            has_bias = any(bias is not None for _, bias in parts)
            bias = torch.cat(biases) if has_bias else None
            return pack_normed(weight, bias, lm.precision, take(f"{norm}.weight"), config.rms_norm_eps)

        query, key, value = (projection(f"self_attn.{letter}_proj") for letter in "qkv")
        query = _mapped(query, lambda tensor: self._by_group(pair_up(tensor, lm.head_dim)))
        key = _mapped(key, lambda tensor: pair_up(tensor, lm.head_dim))
        self._qkv = fused([query, key, value], "input_layernorm")
        self._query_key_gain: Tensor | None = None
        if f"{prefix}self_attn.q_norm.weight" in state:
            gains = [pair_up(take(f"self_attn.{letter}_norm.weight"), lm.head_dim) for letter in "qk"]
            repeated = [gains[0].repeat(lm.groups * lm.num_kv_heads, 1), gains[1].repeat(lm.num_kv_heads, 1)]
            self._query_key_gain = torch.cat(repeated).to(lm.dtype)
        self._eps = float(config.rms_norm_eps)
        weight, bias = projection("self_attn.o_proj")
        self._output = pack_linear(self._by_group(weight.t()).t(), bias, lm.precision)

        self._gate_up = fused([projection("mlp.gate_proj"), projection("mlp.up_proj")], "post_attention_layernorm")
        self._down = pack_linear(*projection("mlp.down_proj"), lm.precision)

    def __call__(self, rows: Tensor, rotations: Tensor, write: Callable[[Tensor], object], reach: Reach) -> None:
        """`rows` [n, hidden] is the residual stream. `write` takes the new positions' keys and values
        [n, 2, kv_heads, head_dim] into the cache. `reach`: what is read of it then."""
        queries, new = self.project(rows, rotations)
        write(new)
        self.finish(rows, _attend(queries, reach))

    def step(self, rows: Tensor, memory: Tensor, start: int, table: Tensor) -> None:
        """The same for a few positions from `start` on, with the layer's `memory` [2, kv_heads, positions, head_dim]
        and the `table` of rotations, by a kernel of our own (see `few_queries`)."""
        qkv = self._project(rows).view(rows.shape[0], *self._shape)
        assert self._attend_few is not None
        self.finish(rows, self._attend_few(qkv, memory, start, None if self._rope is None else table))

    def project(self, rows: Tensor, rotations: Tensor) -> tuple[Tensor, Tensor]:
        """What attention needs of the residual stream: queries [n, groups, kv_heads, head_dim], and keys and values
        [n, 2, kv_heads, head_dim]."""
        qkv = self._project(rows)
        if self._rope is not None:
            self._rope.rotate_(qkv, rotations)
        queries, new = qkv.view(rows.shape[0], *self._shape).split_with_sizes(self._parts, 1)
        return queries, new

    def _project(self, rows: Tensor) -> Tensor:
        """Queries, keys and values side by side, not rotated yet."""
        qkv = self._qkv(rows)
        if self._query_key_gain is not None:
            heads = qkv.view(rows.shape[0], -1, self._head_dim).narrow(1, 0, len(self._query_key_gain))
            normed = functional.rms_norm(heads, (self._head_dim,), None, self._eps)
            torch.mul(normed, self._query_key_gain, out=heads)
        return qkv

    def finish(self, rows: Tensor, attended: Tensor) -> None:
        """Add to the residual stream what attention [n, heads * head_dim] and then the MLP make of it."""
        self._output.add_to(rows, attended)
        self._down.add_gated_to(rows, self._gate_up(rows))

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
    keys, values, mask = reach
    if not folded(count, groups):
        keys, values = keys.expand(groups, -1, -1, -1), values.expand(groups, -1, -1, -1)
        attended = functional.scaled_dot_product_attention(queries.permute(1, 2, 0, 3), keys, values, attn_mask=mask)
        return attended.permute(2, 0, 1, 3).reshape(count, -1)
    rows = count * groups
    block = queries.reshape(rows, kv_heads, head_dim)
    if block.dtype == torch.float32 or block.is_cuda:
        attended = attend_by_products(block.transpose(0, 1), keys, values, mask)
    else:
        attended = functional.scaled_dot_product_attention(block.transpose(0, 1), keys, values, attn_mask=mask)
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


def _mapped(projection: tuple[Tensor, Tensor | None], change: Any) -> tuple[Tensor, Tensor | None]:
    weight, bias = projection
    return change(weight), None if bias is None else change(bias)
