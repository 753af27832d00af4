"""Many texts at once: the lean decoder with one slot per text, each at a position of its own.

A lean forward serves one sequence; here its layers' weights are read once for all slots, which is what makes writing
training text affordable, and only attention differs. A slot that ends is reset and goes on with the next text at
once, so no slot ever waits for the longest one. Every step feeds one token per slot. What all texts begin with is read
once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..models.lean import LeanLM
from ..models.lean_layer import attend_by_products
from ..models.linear import best_cpu_precision


class SlotDecoder:
    """The target over `slots` texts of at most `capacity` positions."""

    def __init__(self, model: LeanLM, slots: int, capacity: int) -> None:
        self._model = model
        model.rope.reach(capacity)
        shape = (len(model.layers), 2, slots, model.num_kv_heads, capacity, model.head_dim)
        self._keys_values = torch.zeros(shape, device=model.device, dtype=model.dtype)
        self._all = torch.arange(slots, device=model.device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=model.device)
        self.capacity = capacity
        self._opening = self._keys_values[:, :, 0, :, :0]  # [layers, 2, kv_heads, n, head_dim]: all texts begin with it

    @classmethod
    def from_folder(cls, folder: Path, slots: int, capacity: int, device: torch.device) -> SlotDecoder:
        """Read a model folder's safetensors files; bfloat16 on a card, 16 bit or float32 on a CPU, whichever is fast
        there. Raises ValueError for another architecture than the Llama family's."""
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            state |= load_file(file, device=str(device))
        precision = best_cpu_precision() if device.type == "cpu" else "bfloat16"
        return cls(LeanLM(config, state, folder.name, precision), slots, capacity)

    def begin_with(self, ids: Sequence[int]) -> Tensor:
        """Have all texts that begin from now on begin with `ids`, read here once for all of them. Returns the float32
        logits [n, vocabulary] after each."""
        self.positions.zero_()
        logits = [self.step(torch.full_like(self.positions, token))[:1] for token in ids]
        self._opening = self._keys_values[:, :, 0, :, : len(ids)].clone()
        return torch.cat(logits) if logits else torch.empty(0, self._model.vocab_size)

    def reset(self, slot: int) -> None:
        """Begin a new text in `slot`; what it held is overwritten as the new text grows."""
        length = self._opening.shape[3]
        self._keys_values[:, :, slot, :, :length] = self._opening
        self.positions[slot] = length

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Feed one token per slot, ids int64 [slots]; returns float32 logits [slots, vocabulary]."""
        model, length = self._model, int(self.positions.max()) + 1
        heads, width = model.num_kv_heads, model.head_dim
        rows, rotations = model.embed(ids), model.rope.at(self.positions, model.rope.table)
        unseen = torch.arange(length, device=ids.device) > self.positions[:, None]  # [slots, T]
        mask = torch.zeros(unseen.shape, device=ids.device, dtype=model.dtype).masked_fill_(unseen, -math.inf)
        mask = mask.repeat_interleave(heads, 0)[:, None]  # [slots * kv_heads, 1, T]
        for layer, memory in zip(model.layers, self._keys_values, strict=True):
            queries, new = layer.project(rows, rotations)
            memory[:, self._all, :, self.positions] = new
            keys, values = memory[:, :, :, :length].reshape(2, -1, length, width)
            block = queries.transpose(1, 2).reshape(len(keys), -1, width)  # [slots * kv_heads, groups, head_dim]
            attended = attend_by_products(block, keys, values, mask)
            layer.finish(rows, attended.view(len(ids), heads, -1, width).transpose(1, 2).reshape(len(ids), -1))
        self.positions += 1
        return model.head(rows).float()
