"""A forward of fixed shape, recorded once as a CUDA graph: a card then runs it without waiting for Python.

For one sequence a layer's kernels take less time than launching them does. A recorded graph is launched as a whole, but
nothing in it may depend on a number that only Python knows. So the position is a tensor, rows are padded to one of a
few widths, and attention reaches over the whole buffer with a mask made from the positions. What padding writes behind
the last position is masked until real positions overwrite it.
"""

from __future__ import annotations

import math
import threading
from functools import partial

import torch
from torch import Tensor

from .lean_buffers import LeanBuffers
from .lean_layer import Decoder, Reach, folded

WIDTHS = (1, 2, 4, 8, 16, 32)
"""Positions per forward; a call is padded to the next."""

_WARM_UPS = 2
_RECORDING = threading.Lock()  # torch records one graph at a time, and a draft model on a card of its own has a thread


class StaticForward:
    """A forward of `width` positions over `buffers`, which must be `WIDTHS[-1]` longer than what is stored in them.

    It records itself at the first call on a CUDA device and computes step by step elsewhere, with the same result.
    """

    def __init__(self, lm: Decoder, buffers: LeanBuffers, width: int) -> None:
        self._lm = lm
        self._keys_values = buffers.keys_values
        self._rotations = lm.rope.table  # a longer one may replace it; the graph keeps reading this one
        self._ids = torch.zeros(width, dtype=torch.int64, device=lm.device)
        self._start = torch.zeros(1, dtype=torch.int64, device=lm.device)
        self._offsets = torch.arange(width, device=lm.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def __call__(self, ids: Tensor, start: int) -> Tensor:
        """Logits float32 [width, vocab_size], of which the first len(ids) mean something, until the next call."""
        self._ids[: ids.shape[0]].copy_(ids)
        self._start.fill_(start)
        if self._lm.device.type != "cuda":
            return self._compute()
        if self._graph is None:
            with _RECORDING, torch.cuda.device(self._lm.device):
                self._graph = self._record()
        self._graph.replay()
        return self._logits

    def _record(self) -> torch.cuda.CUDAGraph:
        """On the current device, in a stream that is no other graph's: libraries keep a work space for each stream, and
        the graphs of two models may run at the same time."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate their workspaces at the first calls
            for _ in range(_WARM_UPS):
                self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._logits = self._compute()
        return graph

    def _compute(self) -> Tensor:
        lm = self._lm
        positions = self._start + self._offsets  # [width]
        mask = self._mask(positions)
        rows, rotations = lm.embed(self._ids), lm.rope.at(positions, self._rotations)
        for layer, memory in zip(lm.layers, self._keys_values, strict=True):
            slots = memory.permute(2, 0, 1, 3)  # [positions, 2, kv_heads, head_dim]
            reach = Reach(memory[0], memory[1], mask)
            layer(rows, rotations, partial(slots.index_copy_, 0, positions), reach)
        return lm.head(rows).float()

    def _mask(self, positions: Tensor) -> Tensor:
        """[rows, positions of the buffer]: 0 up to a row's own position, -inf behind it; rows as queries are folded."""
        width, groups = len(self._offsets), self._lm.groups
        if folded(width, groups):
            positions = positions.repeat_interleave(groups, output_size=width * groups)
        columns = torch.arange(self._keys_values.shape[3], device=positions.device)
        hidden = columns > positions[:, None]
        return torch.zeros(hidden.shape, device=positions.device, dtype=self._lm.dtype).masked_fill_(hidden, -math.inf)
