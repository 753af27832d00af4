"""A decoder for the Llama family with nothing in it that one sequence does not need.

Speculation pays when a forward costs what its weights' bytes cost, so everything else is kept small: queries, keys
and values come from one product and so do gate and up; keys and values are written into a buffer allocated before the
run; a rotation is one multiplication; logits are made only where asked. What can be done once is done to the weights
at loading: rows are reordered so that no activation is ever transposed (see `lean_layer`), and on the CPU a norm's gain
is folded into the product behind it where the precision has room for that.

Work per forward does not grow with the context, except in attention itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .cuda_graphs import WIDTHS, StaticForward
from .lean_buffers import LeanBuffers
from .lean_layer import LeanLayer, folded
from .lean_tree import LeanBranches
from .linear import Linear, activation_dtype, kernel_obstacle, pack_normed, precision_obstacle
from .names import FAMILIES
from .rope import Rope, rope_obstacle

_PREFILL_CHUNK = 512
_CAPACITY_STEP = 256
"""Buffers are allocated in multiples of this, so that runs of similar length share them."""


class LeanLM:
    """`LanguageModel` over packed weights.

    `state` maps transformers' parameter names to tensors on one device, and is emptied while the weights are packed, so
    that a caller who keeps no other reference never holds them twice. `lm_head.weight` may have any number of rows;
    without it the embedding serves (tied weights). `config` is the transformers configuration. vocab_ids: the ids that
    the columns of the logits are, where they are not their index; `embedding_offsets` [their number, hidden], if given,
    is added to these ids' embeddings. Raises ValueError when the model is not of a known family or the
    state holds a tensor that has no place.
    """

    branching = True  # see `base.can_branch`

    def __init__(
        self,
        config: Any,
        state: dict[str, Tensor],
        name: str,
        precision: str = "float32",
        vocab_size: int | None = None,
        vocab_ids: Tensor | None = None,
        embedding_offsets: Tensor | None = None,
    ) -> None:
        self.embedding = state.pop("model.embed_tokens.weight")  # [rows, hidden], in the dtype it was loaded in
        self.device = self.embedding.device
        if obstacle := self.supports(config) or precision_obstacle(precision, self.device):
            raise ValueError(f"{name}: {obstacle}")
        head = state.pop("lm_head.weight", self.embedding)
        if config.tie_word_embeddings and head.shape == self.embedding.shape:
            head = self.embedding  # as transformers does, whatever the file says
        for name_of in [key for key in state if key.endswith("rotary_emb.inv_freq")]:
            del state[name_of]  # in old files; computed here
        on_cpu = self.device.type == "cpu"
        self.name = name
        self.precision = precision
        self.graphs = self.device.type == "cuda"  # whether few positions go through recorded graphs
        self.forward_path = "lean, CUDA graphs" if self.graphs else "lean"
        self.dtype = activation_dtype(precision, self.device)
        self.vocab_size = min(vocab_size or head.shape[0], head.shape[0])
        self.vocab_ids = vocab_ids
        self.context_length = _context_length(config)
        self.num_kv_heads = int(config.num_key_value_heads)
        self.groups = int(config.num_attention_heads) // self.num_kv_heads
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self.attend_few = _attend_few(self.head_dim) if self.dtype == torch.float32 and on_cpu else None
        rotated_heads = (self.groups + 1) * self.num_kv_heads  # queries and keys; values do not rotate
        self.rope = Rope(config, rotated_heads, self.num_kv_heads, self.device, self.dtype)
        self.layers, self.head = self._pack(config, state, head)
        if state:
            raise ValueError(f"{name}: the lean forward has no place for {', '.join(sorted(state)[:3])}")
        self._offsets: Tensor | None = None  # [ids with an offset, and a last row of zeros; hidden]
        if vocab_ids is not None and embedding_offsets is not None:
            self._offsets = functional.pad(embedding_offsets.to(self.dtype), (0, 0, 0, 1))
            self._offset_of = torch.full((self.embedding.shape[0],), len(vocab_ids), device=self.device)
            self._offset_of[vocab_ids] = torch.arange(len(vocab_ids), device=self.device)
        self._pool: list[LeanBuffers] = []
        self.between_layers: Callable[[], None] | None = None  # see `base.call_between_layers`

    def _pack(self, config: Any, state: dict[str, Tensor], head: Tensor) -> tuple[list[LeanLayer], Linear]:
        """All layers and the head. On the CPU packing is C++ on one processor that lets Python run on: as many weights
        at once as there are processors. Elsewhere it is one quick copy after the other, in this thread: where a card is
        emulated, no other thread knows it."""
        indices, gain = range(config.num_hidden_layers), state.pop("model.norm.weight")

        def pack_head() -> Linear:
            return pack_normed(head[: self.vocab_size], None, self.precision, gain, config.rms_norm_eps)

        if self.device.type != "cpu":
            return [LeanLayer(self, config, index, state) for index in indices], pack_head()
        with ThreadPoolExecutor(torch.get_num_threads()) as workers:
            packed_head = workers.submit(pack_head)
            layers = workers.map(lambda index: LeanLayer(self, config, index, state), indices)
            return list(layers), packed_head.result()

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
            if buffers.positions >= capacity + (WIDTHS[-1] if self.graphs else 0):
                return LeanCache(self, capacity, self._pool.pop(index))
        self._pool.clear()  # all are too small by now
        needed = capacity + (WIDTHS[-1] if self.graphs else 0)  # padding is written behind the last position
        positions = math.ceil(needed / _CAPACITY_STEP) * _CAPACITY_STEP
        self.rope.reach(positions)  # the buffers may serve a longer run later
        return LeanCache(self, capacity, LeanBuffers(self, positions))

    def give_back(self, buffers: LeanBuffers) -> None:
        """A closed cache's buffers, for the next run."""
        self._pool.append(buffers)

    def forward(self, ids: Tensor, start: int, buffers: LeanBuffers) -> Tensor:
        """The residual stream [n, hidden] behind the last layer, for `ids` int64 [n] at positions start, ..."""
        count, rows, between = ids.shape[0], self.embed(ids), self.between_layers
        if self.attend_few is not None and folded(count, self.groups):
            for layer, memory in zip(self.layers, buffers.layers, strict=True):
                layer.step(rows, memory, start, self.rope.table)
                if between is not None:
                    between()
            return rows
        rotations = self.rope.between(start, start + count)
        for layer, (slots, reach) in zip(self.layers, buffers.views(start, count), strict=True):
            layer(rows, rotations, slots.copy_, reach)
            if between is not None:
                between()
        return rows

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream [n, hidden] before the first layer."""
        rows = self.embedding.index_select(0, ids).to(self.dtype)
        if self._offsets is not None:
            rows = rows + self._offsets.index_select(0, self._offset_of.index_select(0, ids))
        return rows

    def static_forward(self, ids: Tensor, start: int, buffers: LeanBuffers) -> Tensor:
        """Logits float32 [width >= n, vocab_size] by a recorded graph, of which the first n rows mean something. The
        first call of a width records it; should that fail, this model runs eagerly from then on."""
        width = next(width for width in WIDTHS if width >= ids.shape[0])
        if width not in buffers.static:
            buffers.static[width] = StaticForward(self, buffers, width)
        try:
            return buffers.static[width](ids, start)
        except RuntimeError as error:
            self.graphs = False
            self.forward_path = f"lean, eager (no CUDA graphs: {str(error).splitlines()[0]})"
            buffers.static.clear()
            return self.head(self.forward(ids, start, buffers)).float()


class LeanCache:
    """`CachedLM` over a `LeanLM` and buffers of its own while it is open."""

    def __init__(self, lm: LeanLM, capacity: int, buffers: LeanBuffers) -> None:
        self._lm = lm
        self._capacity = capacity
        self._buffers: LeanBuffers | None = buffers
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
        if self._lm.graphs and count <= WIDTHS[-1]:
            logits = self._lm.static_forward(ids, self._cached, self._buffers)
            self._cached += count
            return logits[count - keep : count]
        last: list[Tensor] = []
        for chunk in ids.split(_PREFILL_CHUNK):
            last.append(self._lm.forward(chunk, self._cached, self._buffers))
            self._cached += chunk.shape[0]
        hidden = last[0] if len(last) == 1 else torch.cat(last)
        logits = self._lm.head(hidden[-keep:])
        return logits.float()

    def branches(self, after: Tensor) -> LeanBranches:
        if self._buffers is None:
            raise ValueError("the cache is closed")
        return LeanBranches(self._lm, self._buffers, self._cached, self._capacity, after)

    def truncate(self, length: int) -> None:
        self._cached = min(self._cached, length)

    def close(self) -> None:
        if self._buffers is not None:
            self._lm.give_back(self._buffers)
            self._buffers = None
        self._cached = 0


def _attend_few(head_dim: int) -> Callable[..., Tensor] | None:
    """The kernel for few positions, compiled now and not in the first forward of every process forked from this one;
    None where it does not run."""
    if head_dim % 8 or kernel_obstacle():
        return None
    from .few_queries import attend_few, attention_kernel

    attention_kernel(head_dim)
    return attend_few


def _context_length(config: Any) -> int:
    """Positions the lean forward may be used for: with a sliding window, as long as nothing has slid out of it."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    length = int(config.max_position_embeddings)
    return length if window is None else min(length, int(window))
