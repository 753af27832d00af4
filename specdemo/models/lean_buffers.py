"""The memory of one run: keys and values by position, allocated before the run and used again by the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from .lean_layer import Decoder, folded

_EVEN_ROWS, _EVEN_END, _EVEN_BLOCK = 4, 64, 512


class LeanBuffers:
    """Keys and values of every layer for a number of positions: [layers, positions, 2, kv_heads, head_dim].

    Which kernels attention uses, and so its last bits, depends on how many queries and keys it is given. Where that
    matters (`even_attention`), few positions get the same bits however they are fed: queries in multiples of 4, keys
    up to the run's end (in multiples of 64) or, in a long run, to that of a block of 512, the kernel's own unit.
    """

    def __init__(self, lm: Decoder, positions: int) -> None:
        shape = (len(lm.layers), positions, 2, lm.num_kv_heads, lm.head_dim)
        self.positions = positions
        self.keys_values = torch.zeros(shape, device=lm.device, dtype=lm.dtype)
        self.static: dict[int, Callable[[Tensor, int], Tensor]] = {}  # by width: forwards recorded over this memory
        self._groups = lm.groups
        self._even = lm.even_attention
        self._end = positions
        self._masks: dict[int, Tensor] = {}

    def begin(self, capacity: int) -> None:
        """A run of at most `capacity` positions."""
        self._end = min(_up(capacity, _EVEN_END), self.positions)

    def views(self, start: int, count: int) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Per layer: where `count` positions from `start` on are written, [count, 2, kv_heads, head_dim], and the keys
        and the values that attention reads, [1, kv_heads, length, head_dim]."""
        slots = self.keys_values[:, start : start + count].unbind()
        length = self._length(start, count)
        keys, values = self.keys_values[:, None, :length].permute(3, 0, 1, 4, 2, 5).unbind()
        return slots, keys.unbind(), values.unbind()

    def causal_mask(self, start: int, count: int) -> Tensor | None:
        """0 or -inf to add to scores [queries, length], or None where every query sees all of it.

        Rows are as `lean_layer` has its queries: for few positions `groups` equal rows per position, and perhaps some
        more that pad them. The mask of a small count is a window of a wide one that is made once.
        """
        if count == 1 and not self._even:
            return None
        if not folded(count, self._groups):
            return self._triangle(start, count, start + count)
        if count not in self._masks:
            self._masks[count] = self._wide_mask(count)
        first = self.positions - start
        return self._masks[count][:, first : first + self._length(start, count)]

    def _length(self, start: int, count: int) -> int:
        """Positions that attention reaches over."""
        stop = start + count
        return min(_up(stop, _EVEN_BLOCK), self._end) if self._even and folded(count, self._groups) else stop

    def _wide_mask(self, count: int) -> Tensor:
        """The mask of `count` positions behind `self.positions` others, for any number of them to be cut off."""
        columns = self.positions + (self.positions if self._even else count)
        wide = self._triangle(self.positions, count, columns).repeat_interleave(self._groups, 0)
        return functional.pad(wide, (0, 0, 0, -len(wide) % _EVEN_ROWS)) if self._even else wide

    def _triangle(self, start: int, count: int, columns: int) -> Tensor:
        like = self.keys_values
        mask = torch.full((count, columns), -math.inf, device=like.device, dtype=like.dtype)
        return mask.triu_(start + 1)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
