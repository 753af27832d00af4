"""Orthogonal changes of basis that spread outliers, so that 8 bits suffice.

A few features of a language model's activations are tens of times larger than the rest, and a scale that reaches
them leaves the rest a handful of levels. After a rotation that mixes every feature into every other, all are of
about one size, and the weights absorb the rotation: x W = (x R) (R' W). With R made of Hadamard blocks and a cosine
transform across the blocks it is quick to apply (QuaRot, arXiv:2404.00456, has the idea with Hadamard matrices).
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

_BLOCK = 64


def rotate(tensor: Tensor) -> Tensor:
    """`tensor` [..., width] in float32, times an orthogonal [width, width] that mixes all features with all."""
    width = tensor.shape[-1]
    signs, across, within = _factors(width)
    blocks = (tensor * signs).unflatten(-1, (len(across), len(within)))
    return torch.matmul(across, torch.matmul(blocks, within)).flatten(-2)


def rotate_blocks(tensor: Tensor) -> Tensor:
    """The same with mixing inside blocks of at most 64 features only: one small product, quick enough at run time."""
    within = _factors(tensor.shape[-1])[2]
    return torch.matmul(tensor.unflatten(-1, (-1, len(within))), within).flatten(-2)


@lru_cache
def _factors(width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random signs [width], a cosine transform across blocks and a Hadamard matrix within them."""
    block = min(width & -width, _BLOCK)  # the largest power of two in `width`
    with torch.inference_mode(False):
        signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width)).float() * 2 - 1
        return signs, _cosines(width // block), _hadamard(block)


def _cosines(size: int) -> Tensor:
    """The orthonormal discrete cosine transform (type 2) [size, size]."""
    index = torch.arange(size, dtype=torch.float64)
    matrix = torch.cos(math.pi / size * index[:, None] * (index + 0.5)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix.float()


def _hadamard(size: int) -> Tensor:
    """Sylvester's matrix [size, size] over sqrt(size); `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)
