"""The memory of one run: keys and values by position, allocated before the run and used again by the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .lean_layer import Decoder, Reach, folded


class LeanBuffers:
    """Keys and values of every layer for a number of positions: [layers, 2, kv_heads, positions, head_dim]."""

    def __init__(self, lm: Decoder, positions: int) -> None:
        shape = (len(lm.layers), 2, lm.num_kv_heads, positions, lm.head_dim)
        self.positions = positions
        self.keys_values = torch.zeros(shape, device=lm.device, dtype=lm.dtype)
        self.layers = self.keys_values.unbind()
        self._by_position = self.keys_values.permute(0, 3, 1, 2, 4)
        self._by_layer = self.keys_values.flatten(0, 1)  # keys, values, the next layer's keys, ...
        self.static: dict[int, Callable[[Tensor, int], Tensor]] = {}  # by width: forwards recorded over this memory
        self._groups = lm.groups
        self._masks: dict[int, Tensor] = {}

    def views(self, start: int, count: int) -> Iterator[tuple[Tensor, Reach]]:
        """Per layer: where `count` positions from `start` on are written, [count, 2, kv_heads, head_dim], and what they
        read then."""
        length = start + count
        slots = self._by_position.narrow(1, start, count).unbind()
        memory = self._by_layer.narrow(2, 0, length).unbind()
        few = folded(count, self._groups)
        mask = self._window(start, count) if few else self._triangle(start, count, length)
        reaches = [Reach(keys, values, mask) for keys, values in zip(memory[::2], memory[1::2], strict=True)]
        return zip(slots, reaches, strict=True)

    def _window(self, start: int, count: int) -> Tensor:
        """The mask [queries, length] of few positions, cut out of a wide one that is made once. Its rows are as
        `lean_layer` folds queries, `groups` equal ones per position."""
        if count not in self._masks:
            wide = self._triangle(self.positions, count, self.positions + count)
            self._masks[count] = wide.repeat_interleave(self._groups, 0)
        return self._masks[count].narrow(1, self.positions - start, start + count)

    def _triangle(self, start: int, count: int, columns: int) -> Tensor:
        """[count, columns] to add to scores: 0 up to a row's own position, the first being `start`, and -inf behind."""
        like = self.keys_values
        mask = torch.full((count, columns), -math.inf, device=like.device, dtype=like.dtype)
        return mask.triu_(start + 1)
