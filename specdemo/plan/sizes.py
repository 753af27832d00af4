"""Bytes: of weights by precision, of key-value caches, of what a forward needs besides.

How a model is kept decides all of them. The lean forward packs products and keeps its activations in the device's own
type; transformers' forward keeps everything in one type; bitsandbytes makes the products inside the layers small and
leaves embeddings, head and norms alone. Every number here is checked against loaded models (`tests/test_sizes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ..settings import MAX_DRAFT_LENGTH
from .shape import ModelShape, Weight

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
GIB = 1 << 30

LANES = 2
"""Lanes of a race, each with a cache of the target's of its own."""

_NF4_BLOCK, _NF4_OUTER_BLOCK = 64, 256
"""bitsandbytes' NF4: one 8-bit scale per 64 weights, and with double quantization one float32 per 256 of these."""

_INT8_OUTPUT_BYTES = 4  # per output: its scale
_LEAN_STEP, _LEAN_PADDING, _LEAN_CHUNK = 256, 32, 512  # see lean.LeanLM.open
_GRAPH_ROWS = 63  # of all widths that are recorded as CUDA graphs: 1 + 2 + 4 + ... + 32

Forward = Literal["lean", "transformers", "bitsandbytes"]


@dataclass(frozen=True, slots=True)
class Kept:
    """How one model is kept. `precision` is that of the products inside its layers, as users know it; `forward` says by
    whose forward it runs; `compute` is the type of its activations and of all that is not quantized."""

    precision: str
    forward: Forward
    compute: str
    device_kind: str = "cpu"


def weight_bytes(shape: ModelShape, kept: Kept) -> int:
    """Memory of the weights once loaded."""
    return sum(module_bytes(shape, kept).values())


def embedding_bytes(shape: ModelShape, kept: Kept) -> int:
    """Memory of the embeddings alone, which the lean forward keeps as they were stored."""
    return shape.of_kind("embedding") * (BYTES.get(shape.stored, 4) if kept.forward == "lean" else BYTES[kept.compute])


@lru_cache(maxsize=256)
def module_bytes(shape: ModelShape, kept: Kept) -> Mapping[str, int]:
    """The same by module, in the order of a forward: embeddings, layers, norm and head."""
    measure: Callable[[ModelShape, Kept, Weight], int] = _lean_bytes if kept.forward == "lean" else _plain_bytes
    modules: dict[str, int] = {}
    for weight in sorted(shape.weights, key=_place):
        modules[weight.module] = modules.get(weight.module, 0) + measure(shape, kept, weight)
    if kept.forward == "lean":
        modules["lm_head"] = modules.get("lm_head", 0) + _lean_extras(shape, kept)
    return modules


def _place(weight: Weight) -> int:
    """Embeddings first, then layers by number, then the rest."""
    if weight.kind == "embedding":
        return -1
    number = "".join(char for char in weight.module.rpartition(".")[2] if char.isdigit())
    return int(number) if number else 1 << 20


def _lean_bytes(shape: ModelShape, kept: Kept, weight: Weight) -> int:
    if weight.kind == "embedding":
        return 0 if shape.shares_embedding else weight.size * BYTES.get(shape.stored, 4)
    if weight.kind in ("linear", "head"):
        return weight.size * BYTES[kept.precision] + (weight.dims[0] * _INT8_OUTPUT_BYTES if _is_int8(kept) else 0)
    return weight.size * BYTES[kept.compute]


def _lean_extras(shape: ModelShape, kept: Kept) -> int:
    """A tied head, which is the embedding itself only where that has the right type already."""
    extras = 0
    if shape.tied and (kept.device_kind == "cpu" or shape.stored != kept.precision):
        extras += shape.vocab * (shape.hidden * BYTES[kept.precision] + (_INT8_OUTPUT_BYTES if _is_int8(kept) else 0))
    return extras


def _plain_bytes(_shape: ModelShape, kept: Kept, weight: Weight) -> int:
    if weight.kind == "linear" and kept.precision == "nf4":
        scales = -(-weight.size // _NF4_BLOCK)
        return -(-weight.size // 2) + scales + 4 * -(-scales // _NF4_OUTER_BLOCK)
    if weight.kind == "linear" and kept.precision == "int8":
        return weight.size + 4 * weight.dims[0]
    return weight.size * BYTES[kept.compute]


def _is_int8(kept: Kept) -> bool:
    return kept.precision == "int8"


def kv_bytes(shape: ModelShape, kept: Kept, positions: int) -> int:
    """One cache of `positions`: keys and values of every layer, in the type of the activations."""
    if kept.forward == "lean":
        padding = _LEAN_PADDING if kept.device_kind == "cuda" else 0
        positions = -(-(positions + padding) // _LEAN_STEP) * _LEAN_STEP
    return shape.layers * positions * 2 * shape.kv_heads * shape.head_dim * BYTES[kept.compute]


def workspace_bytes(shape: ModelShape, kept: Kept, positions: int, caches: int) -> int:
    """What forwards need besides: activations of a chunk of the prompt, its mask, the logits of the longest draft and
    the distributions made from them, a quantized product's weights widened, and CUDA graphs for each cache."""
    activation = BYTES[kept.compute]
    rows = min(positions, _LEAN_CHUNK) if kept.forward == "lean" else positions
    attention = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    per_row = activation * (4 * shape.hidden + 2 * attention + 3 * shape.intermediate)
    mask = rows * positions * activation
    logits = 4 * 4 * (MAX_DRAFT_LENGTH + 1) * shape.vocab
    widened = 0
    if kept.forward == "bitsandbytes":
        widened = shape.largest_linear * (4 if kept.device_kind == "cpu" else activation)
    graphs = 0
    if kept.forward == "lean" and kept.device_kind == "cuda":
        graphs = (
            caches * _GRAPH_ROWS * (per_row + (4 + activation) * shape.vocab + positions * shape.heads * activation)
        )
    return rows * per_row + mask + logits + widened + graphs
