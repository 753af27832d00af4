"""The draft while it learns: a shallow Llama over whole padded batches, in float32.

It reads the target's frozen embeddings and scores a reduced vocabulary with rows of the same frozen embeddings. What it
learns are its layers, which start from the target's first and last ones, a final norm, and an offset to the embedding
of each token of the reduced vocabulary: a draft is too small to find out in its layers what mostly follows a word, and
an offset says it at no cost in time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from .data import Batch


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama, the target's or the draft's."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What a draft takes from its target."""

    shape: Shape
    embeddings: Tensor  # float32 [vocab, hidden]
    first: Mapping[str, Tensor]  # a layer's tensors by their names inside the layer
    last: Mapping[str, Tensor]
    norm: Tensor  # [hidden]


def target_parts(folder: Path) -> TargetParts:
    """Read a Llama's embeddings, first and last layer and final norm from a folder of safetensors files."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    shape = Shape(
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        norm_eps=config["rms_norm_eps"],
    )
    first, last = "model.layers.0.", f"model.layers.{shape.layers - 1}."
    wanted: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if name.startswith((first, last)) or name in ("model.embed_tokens.weight", "model.norm.weight"):
                    wanted[name] = tensors.get_tensor(name).float()
    return TargetParts(
        shape,
        wanted["model.embed_tokens.weight"],
        {name.removeprefix(first): tensor for name, tensor in wanted.items() if name.startswith(first)},
        {name.removeprefix(last): tensor for name, tensor in wanted.items() if name.startswith(last)},
        wanted["model.norm.weight"],
    )


class Layer(nn.Module):
    """One Llama layer with fused projections; `rows` picks the positions whose output is needed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attention_norm = nn.Parameter(torch.ones(shape.hidden))
        self.qkv = nn.Parameter(torch.empty(inner + 2 * kv, shape.hidden))
        self.output = nn.Parameter(torch.empty(shape.hidden, inner))
        self.mlp_norm = nn.Parameter(torch.ones(shape.hidden))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.intermediate, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.hidden, shape.intermediate))

    @torch.no_grad()
    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a layer of the target; of its MLP the first `intermediate` neurons in the order given."""
        self.attention_norm.copy_(tensors["input_layernorm.weight"])
        self.qkv.copy_(torch.cat([tensors[f"self_attn.{part}_proj.weight"] for part in "qkv"]))
        self.output.copy_(tensors["self_attn.o_proj.weight"])
        self.mlp_norm.copy_(tensors["post_attention_layernorm.weight"])
        gate, up, down = (tensors[f"mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        kept = (gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)).argsort(descending=True)
        kept = kept[: self.shape.intermediate].sort().values
        self.gate_up.copy_(torch.cat([gate[kept], up[kept]]))
        self.down.copy_(down[:, kept])

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [B, T, hidden] -> x + attention(x)."""
        shape = self.shape
        b, t, _ = x.shape
        sizes = [shape.heads * shape.head_dim] + [shape.kv_heads * shape.head_dim] * 2
        qkv = functional.linear(functional.rms_norm(x, (shape.hidden,), self.attention_norm, shape.norm_eps), self.qkv)
        q, k, v = (part.view(b, t, -1, shape.head_dim).transpose(1, 2) for part in qkv.split(sizes, dim=-1))
        groups = shape.heads // shape.kv_heads
        k, v = (rotate(k, cos, sin).repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
        mixed = functional.scaled_dot_product_attention(rotate(q, cos, sin), k, v, is_causal=True)
        return x + functional.linear(mixed.transpose(1, 2).reshape(b, t, -1), self.output)

    def think(self, x: Tensor) -> Tensor:
        """x: [..., hidden] -> x + mlp(x)."""
        normed = functional.rms_norm(x, (self.shape.hidden,), self.mlp_norm, self.shape.norm_eps)
        gate, up = functional.linear(normed, self.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, self.down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding, halves convention; x: [..., T, head_dim], cos and sin: [T, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-b, a], dim=-1) * sin


def rotary_tables(
    length: int, head_dim: int, theta: float, device: torch.device | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [length, head_dim]."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), theta**-exponents)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


class _HeadLoss(torch.autograd.Function):
    """sum over rows and k of -weights[s, k] * log_softmax(states @ head.T)[s, ids[s, k]], head frozen.

    The gradient is made on the way forward, some rows at a time, so that no [S, vocabulary] tensor ever leaves the
    processor's cache.
    """

    ROWS = 256

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        gradient = torch.empty_like(states)
        total = states.new_zeros(())
        for begin in range(0, len(states), _HeadLoss.ROWS):
            rows = slice(begin, begin + _HeadLoss.ROWS)
            logits = states[rows] @ head.T
            log_total = logits.logsumexp(dim=-1, keepdim=True)
            mass = weights[rows].sum(dim=-1, keepdim=True)
            total += (log_total * mass).sum() - (logits.gather(1, ids[rows]) * weights[rows]).sum()
            slope = logits.sub_(log_total).exp_().mul_(mass).scatter_add_(1, ids[rows], -weights[rows])
            torch.mm(slope, head, out=gradient[rows])
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * slope, None, None, None


class Student(nn.Module):
    """The draft. `embeddings` and `head` are the target's and frozen; they are no part of `state_dict`."""

    def __init__(self, shape: Shape, embeddings: Tensor, vocab_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("embeddings", embeddings, persistent=False)
        self.register_buffer("head", embeddings[vocab_ids].contiguous(), persistent=False)
        self.register_buffer("vocab_ids", vocab_ids, persistent=False)
        reduced = torch.full((len(embeddings),), -1, dtype=torch.int64)
        reduced[vocab_ids] = torch.arange(len(vocab_ids))
        self.register_buffer("reduced_of_full", reduced, persistent=False)
        self.embeddings: Tensor
        self.head: Tensor
        self.vocab_ids: Tensor
        self.reduced_of_full: Tensor
        self.offsets = nn.Parameter(torch.zeros(len(vocab_ids), shape.hidden))
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.Parameter(torch.ones(shape.hidden))

    @classmethod
    def from_target(cls, parts: TargetParts, layers: int, intermediate: int, vocab_ids: Tensor) -> Student:
        """A fresh draft: every layer but the last starts from the target's first one."""
        source = parts.shape
        shape = Shape(
            layers,
            source.hidden,
            min(intermediate, source.intermediate),
            source.heads,
            source.kv_heads,
            source.head_dim,
            source.rope_theta,
            source.norm_eps,
        )
        student = cls(shape, parts.embeddings, vocab_ids)
        for i, layer in enumerate(student.layers):
            assert isinstance(layer, Layer)
            layer.start_from(parts.last if i == layers - 1 else parts.first)
        with torch.no_grad():
            student.norm.copy_(parts.norm)
        return student

    def embed(self, ids: Tensor) -> Tensor:
        """The residual stream [..., hidden] before the first layer: embeddings and, where there are any, offsets."""
        reduced = self.reduced_of_full[ids]
        offsets = functional.embedding(reduced.clamp(min=0), self.offsets)
        return self.embeddings[ids] + offsets * (reduced >= 0).unsqueeze(-1)

    def final_states(self, batch: Batch) -> Tensor:
        """Normed states [S, hidden] at the batch's rows, ready for the head."""
        x = self.embed(batch.ids)
        cos, sin = rotary_tables(x.shape[1], self.shape.head_dim, self.shape.rope_theta, x.device)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            x = layer.attend(x, cos, sin)
            if i == len(self.layers) - 1:
                x = x.flatten(0, 1)[batch.rows]  # the last MLP and the head only where something is learned
            x = layer.think(x)
        return functional.rms_norm(x, (self.shape.hidden,), self.norm, self.shape.norm_eps)

    def forward(self, batch: Batch) -> Tensor:
        """Logits [S, reduced vocabulary] at the batch's rows."""
        return functional.linear(self.final_states(batch), self.head)

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy against the target's likeliest tokens, summed over the rows.

        Tokens outside the reduced vocabulary and the tail beyond the top four weigh nothing: the draft is not asked
        to spend probability on what it will not propose.
        """
        reduced = self.reduced_of_full[batch.top_ids]
        weights = batch.top_probs * (reduced >= 0)
        total: Tensor = _HeadLoss.apply(  # type: ignore[no-untyped-call]
            self.final_states(batch), self.head, reduced.clamp(min=0), weights
        )
        return total

    @torch.no_grad()
    def agreement(self, batch: Batch) -> tuple[int, float, int]:
        """(rows where the argmax is the target's, sum over rows of min(p, q) over the target's top four, rows)."""
        logits = self(batch)
        reduced = self.reduced_of_full[batch.top_ids]
        agreed = (logits.argmax(dim=-1) == reduced[:, 0]).sum().item()
        q = (logits.gather(1, reduced.clamp(min=0)) - logits.logsumexp(dim=-1, keepdim=True)).exp() * (reduced >= 0)
        return int(agreed), float(torch.minimum(q, batch.top_probs).sum()), len(batch.rows)
