"""The memory of one run: keys and values by position, allocated before the run and used again by the next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from .lean_layer import Decoder, Reach, folded

_EVEN_ROWS, _EVEN_BLOCK = 4, 64


class LeanBuffers:
    """Keys and values of every layer for a number of positions: [layers, 2, kv_heads, positions, head_dim].

    Which kernels attention uses, and so its last bits, depends on how many queries and keys it is given. Where that
    matters (`even_attention`), few positions get the same bits however they are fed: queries come in multiples of 4,
    and a position reads up to the end of the block of 64 that it stands in. Positions on two sides of such an end
    attend one after the other.
    """

    def __init__(self, lm: Decoder, positions: int) -> None:
        shape = (len(lm.layers), 2, lm.num_kv_heads, positions, lm.head_dim)
        self.positions = positions
        self.keys_values = torch.zeros(shape, device=lm.device, dtype=lm.dtype)
        self._by_position = self.keys_values.permute(0, 3, 1, 2, 4)
        self._by_layer = self.keys_values.flatten(0, 1)  # keys, values, the next layer's keys, ...
        self.static: dict[int, Callable[[Tensor, int], Tensor]] = {}  # by width: forwards recorded over this memory
        self._groups = lm.groups
        self._even = lm.even_attention
        self._masks: dict[int, Tensor] = {}

    def views(self, start: int, count: int) -> Iterator[tuple[Tensor, tuple[Reach, ...]]]:
        """Per layer: where `count` positions from `start` on are written, [count, 2, kv_heads, head_dim], and what they
        read then."""
        slots = self._by_position.narrow(1, start, count).unbind()
        reaches = [self._reaches(part, start, folded(count, self._groups)) for part in self._parts(start, count)]
        return zip(slots, zip(*reaches, strict=True), strict=True)

    def _parts(self, start: int, count: int) -> list[range]:
        """The positions, cut where they cannot attend together."""
        stop = start + count
        if not self._even or not folded(count, self._groups):
            return [range(start, stop)]
        ends = [*range(_up(start + 1, _EVEN_BLOCK), stop, _EVEN_BLOCK), stop]
        return [range(first, end) for first, end in zip([start, *ends], ends, strict=False)]

    def _reaches(self, part: range, start: int, is_folded: bool) -> list[Reach]:
        """For every layer, what the positions `part` read, in a call whose first is `start`."""
        length = _up(part.stop, _EVEN_BLOCK) if self._even and is_folded else part.stop
        mask = self._window(part, length) if is_folded else self._triangle(part.start, len(part), length)
        first, count, memory = part.start - start, len(part), self._by_layer.narrow(2, 0, length).unbind()
        return [Reach(first, count, keys, values, mask) for keys, values in zip(memory[::2], memory[1::2], strict=True)]

    def _window(self, part: range, length: int) -> Tensor:
        """The mask [queries, length] of few positions, cut out of a wide one that is made once.

        Its rows are as `lean_layer` folds queries, `groups` equal ones per position, and perhaps some that pad them.
        """
        count, behind = len(part), self.positions - part.start
        if count not in self._masks:
            columns = self.positions + count + (_EVEN_BLOCK if self._even else 0)
            wide = self._triangle(self.positions, count, columns).repeat_interleave(self._groups, 0)
            missing = -len(wide) % _EVEN_ROWS if self._even else 0
            self._masks[count] = functional.pad(wide, (0, 0, 0, missing))
        return self._masks[count].narrow(1, behind, length)

    def _triangle(self, start: int, count: int, columns: int) -> Tensor:
        """[count, columns] to add to scores: 0 up to a row's own position, the first being `start`, and -inf behind."""
        like = self.keys_values
        mask = torch.full((count, columns), -math.inf, device=like.device, dtype=like.dtype)
        return mask.triu_(start + 1)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
