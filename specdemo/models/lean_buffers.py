"""The memory of one run: keys and values by position, allocated before the run and used again by the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .lean_layer import Decoder, folded


class LeanBuffers:
    """Keys and values of every layer for a number of positions: [layers, positions, 2, kv_heads, head_dim]."""

    def __init__(self, lm: Decoder, positions: int) -> None:
        shape = (len(lm.layers), positions, 2, lm.num_kv_heads, lm.head_dim)
        self.positions = positions
        self.keys_values = torch.zeros(shape, device=lm.device, dtype=lm.dtype)
        self.static: dict[int, Callable[[Tensor, int], Tensor]] = {}  # by width: forwards recorded over this memory
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

        Rows are as `lean_layer` has its queries: for few positions `groups` equal rows per position. The mask of a
        small count is a window of a wide one that is made once: zeros to the left, the triangle at the right end.
        """
        if count == 1:
            return None
        if not folded(count, self._groups):
            return self._triangle(start, count)
        if count not in self._masks:
            wide = self._triangle(self.positions, count)
            self._masks[count] = wide.repeat_interleave(self._groups, 0)
        return self._masks[count][:, self.positions - start :]

    def _triangle(self, start: int, count: int) -> Tensor:
        like = self.keys_values
        mask = torch.full((count, start + count), -math.inf, device=like.device, dtype=like.dtype)
        return mask.triu_(start + 1)
