"""Several continuations of one cache at once, to draft for what may come next.

A branch continues the first positions of the cache. One forward takes one token of every branch: the branches are the
rows of a batch, and a mask shows each the positions that it continues and its own tokens. Their keys and values stand
behind the cache's last position and are never counted as cached, so that the next `extend` writes over them: nothing
of a branch is ever adopted.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .lean_buffers import LeanBuffers
from .lean_layer import Decoder, Reach, folded


class LeanBranches:
    """`Branches` of a lean model over the first `cached` positions of `buffers`, which end at `capacity`.

    after: int64 [B], on the model's device: how many positions of the cache each branch continues.
    """

    def __init__(self, lm: Decoder, buffers: LeanBuffers, cached: int, capacity: int, after: Tensor) -> None:
        self._lm = lm
        self._memory = buffers.keys_values
        self._next, self._capacity = cached, capacity
        self._positions = after
        columns = torch.arange(capacity, device=lm.device)
        self._mask = torch.zeros(len(after), capacity, device=lm.device, dtype=lm.dtype)
        self._mask.masked_fill_(columns >= after[:, None], -math.inf)

    @torch.inference_mode()
    def extend(self, ids: Tensor) -> Tensor:
        lm, count, start = self._lm, len(ids), self._next
        stop = start + count
        if stop > self._capacity:
            raise ValueError(f"{stop} positions are more than the cache's {self._capacity}")
        self._mask[:, start:stop].fill_diagonal_(0.0)
        mask = self._mask[:, :stop]
        if folded(count, lm.groups):
            mask = mask.repeat_interleave(lm.groups, 0)
        slots = self._memory[:, :, :, start:stop].permute(0, 3, 1, 2, 4).unbind()
        keys, values = self._memory[:, :, :, :stop].unbind(1)
        rows, rotations = lm.embed(ids), lm.rope.at(self._positions, lm.rope.table)
        for layer, slot, key, value in zip(lm.layers, slots, keys.unbind(), values.unbind(), strict=True):
            layer(rows, rotations, slot.copy_, Reach(key, value, mask))
        self._next = stop
        self._positions = self._positions + 1
        return lm.head(rows).float()

    @torch.inference_mode()
    def only(self, branch: int) -> None:
        self._positions, self._mask = self._positions[branch : branch + 1], self._mask[branch : branch + 1]
