"""Many texts at once: a Llama decoder with one slot per text, each at a position of its own.

The lean forward serves one sequence; here the weights are read once for all slots, which is what makes writing
training text affordable. A slot that ends is reset and goes on with the next text at once, so no slot ever waits for
the longest one. Every step feeds one token per slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from ..models.lean import LeanLM
from .student import rotary_tables, rotate


class SlotDecoder:
    """The target over `slots` texts of at most `capacity` positions.

    state: transformers' parameter names -> tensors, all on one device. Raises ValueError for another architecture than
    the Llama family's plain ones.
    """

    def __init__(self, config: Any, state: Mapping[str, Tensor], slots: int, capacity: int) -> None:
        if obstacle := LeanLM.supports(config) or ("SmolLM3" if config.model_type == "smollm3" else None):
            raise ValueError(f"text is written by Llama-like targets only, not by {obstacle}")
        self._state = state
        self._config = config
        self._heads, self._kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
        self._head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self._heads)
        self._embedding = state["model.embed_tokens.weight"]
        self._head = state.get("lm_head.weight", self._embedding)
        device, dtype = self._embedding.device, self._embedding.dtype
        theta = float(config.rope_parameters["rope_theta"])
        cos, sin = rotary_tables(capacity, self._head_dim, theta, device)
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)
        shape = (config.num_hidden_layers, slots, self._kv_heads, capacity, self._head_dim)
        self._keys = torch.zeros(shape, device=device, dtype=dtype)
        self._values = torch.zeros(shape, device=device, dtype=dtype)
        self._all = torch.arange(slots, device=device)
        self.positions = torch.zeros(slots, dtype=torch.long, device=device)
        self.capacity = capacity

    @classmethod
    def from_folder(cls, folder: Path, slots: int, capacity: int, device: torch.device) -> SlotDecoder:
        """Read a model folder's safetensors files; float32 on a CPU, bfloat16 elsewhere."""
        from transformers import AutoConfig

        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        state: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                state |= {name: tensors.get_tensor(name).to(device, dtype) for name in tensors.keys()}  # noqa: SIM118
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        return cls(config, state, slots, capacity)

    def reset(self, slot: int) -> None:
        """Begin a new text in `slot`; what it held is overwritten as the new text grows."""
        self.positions[slot] = 0

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """Feed one token per slot, ids int64 [slots]; returns float32 logits [slots, vocabulary]."""
        slots, length = len(ids), int(self.positions.max()) + 1
        cos, sin = self._cos[self.positions][:, None, None], self._sin[self.positions][:, None, None]
        seen = (torch.arange(length, device=ids.device) <= self.positions[:, None])[:, None, None]  # [slots, 1, 1, T]
        x = functional.embedding(ids, self._embedding)
        for index in range(len(self._keys)):
            prefix = f"model.layers.{index}."
            normed = self._norm(x, prefix + "input_layernorm")
            q, k, v = (
                self._linear(normed, f"{prefix}self_attn.{part}_proj").view(slots, -1, 1, self._head_dim)
                for part in "qkv"
            )
            if f"{prefix}self_attn.q_norm.weight" in self._state:
                q, k = self._norm(q, prefix + "self_attn.q_norm"), self._norm(k, prefix + "self_attn.k_norm")
            keys, values = self._keys[index], self._values[index]
            keys[self._all, :, self.positions] = rotate(k, cos, sin).squeeze(2)
            values[self._all, :, self.positions] = v.squeeze(2)
            # the queries that share a key head are that head's rows
            rows = rotate(q, cos, sin).view(slots, self._kv_heads, -1, self._head_dim)
            mixed = functional.scaled_dot_product_attention(
                rows, keys[:, :, :length], values[:, :, :length], attn_mask=seen
            )
            x = x + self._linear(mixed.reshape(slots, -1), prefix + "self_attn.o_proj")
            normed = self._norm(x, prefix + "post_attention_layernorm")
            gate, up = self._linear(normed, prefix + "mlp.gate_proj"), self._linear(normed, prefix + "mlp.up_proj")
            x = x + self._linear(functional.silu(gate) * up, prefix + "mlp.down_proj")
        self.positions += 1
        return functional.linear(self._norm(x, "model.norm"), self._head).float()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._state[name + ".weight"], self._state.get(name + ".bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self._state[name + ".weight"]
        return functional.rms_norm(x, (weight.shape[0],), weight, self._config.rms_norm_eps)
