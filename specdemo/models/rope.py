"""Rotary position embedding as a table: one rotation per position and pair of features, made once.

The two features of a pair, i and i + half in the usual layout, are put side by side (`pair_up`, applied to the
weights that make queries and keys, never at run time). Dot products do not change by that, and a rotation becomes
one multiplication of complex numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STATIC_KINDS = ("default", "linear", "llama3", "yarn")
"""Scalings whose frequencies are fixed. The others change them with the length of the sequence at run time, so that
keys in the cache would have been rotated by other angles."""


def rope_obstacle(config: Any) -> str | None:
    """Why the model's rotary embedding is not known here, or None if it is."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kind = parameters.get("rope_type", "default")
    if kind not in STATIC_KINDS:
        return f"RoPE scaling {kind}"
    if parameters.get("partial_rotary_factor", 1.0) != 1.0 or getattr(config, "partial_rotary_factor", 1.0) != 1.0:
        return "a rotary embedding of a part of each head"
    return None


def pair_up(weight: Tensor, head_dim: int) -> Tensor:
    """[heads * head_dim, ...]: within each head, feature i and feature i + head_dim / 2 become neighbours."""
    halves = weight.view(-1, 2, head_dim // 2, *weight.shape[1:])
    return halves.transpose(1, 2).reshape(weight.shape)


class Rope:
    """Rotations by position, for as many positions as were asked for by `reach`.

    They are applied to rows of `moved` heads that rotate and then `still` heads that do not, as wide as such a row, so
    that a row is one flat multiplication; no rotation is one of the table's two kinds. float32 on the CPU: complex
    numbers; else cosines and signed sines.
    """

    def __init__(self, config: Any, moved: int, still: int, device: torch.device, dtype: torch.dtype) -> None:
        self._frequencies, self._scaling = _frequencies(config)  # [head_dim / 2]
        self._kinds = torch.tensor([0] * moved + [1] * still, device=device)  # of each head: rotates, or does not
        self._device, self._dtype = device, dtype
        self._complex = dtype == torch.float32 and device.type == "cpu"
        self.table = torch.empty(0)

    def reach(self, length: int) -> None:
        """Make the rotations of positions 0 .. length - 1."""
        if len(self.table) >= length:
            return
        angles = torch.arange(length, dtype=torch.float32)[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        if self._complex:
            rotation = torch.complex(cos, sin)
            self.table = torch.stack([rotation, torch.ones_like(rotation)], 1)  # [length, kinds, head_dim / 2]
        else:
            doubled = torch.stack([cos, cos], -1).flatten(1), torch.stack([-sin, sin], -1).flatten(1)
            none = torch.ones_like(doubled[0]), torch.zeros_like(doubled[1])
            table = torch.stack([torch.stack(doubled, 1), torch.stack(none, 1)], 2)
            self.table = table.to(self._device, self._dtype)  # [length, 2, kinds, head_dim]

    def between(self, start: int, stop: int) -> Tensor:
        """The rotations of positions start .. stop - 1, for `rotate_`."""
        return self._widened(self.table[start:stop])

    def at(self, positions: Tensor, table: Tensor) -> Tensor:
        """The rotations of `positions` int64 [n], for `rotate_`, out of a `table` that this object has or had."""
        return self._widened(table[positions])

    def _widened(self, rows: Tensor) -> Tensor:
        """Rows of the table as [n, width / 2] complex, or [n, 2, width]."""
        return rows.index_select(-2, self._kinds).flatten(-2)

    def rotate_(self, rows: Tensor, rotations: Tensor) -> None:
        """Rotate `rows` [n, width] in place, row i by rotation i."""
        if self._complex:
            rows.view(torch.complex64).mul_(rotations)
            return
        swapped = rows.unflatten(1, (-1, 2)).flip(2).flatten(1)
        rows.mul_(rotations[:, 0]).addcmul_(swapped, rotations[:, 1])


def _frequencies(config: Any) -> tuple[Tensor, float]:
    """Radians per position of each pair of features (Su et al. 2021, section 3.2.2), and the factor on cosine and
    sine. Scaled kinds are computed by transformers; its table leaves the plain kind to the models' own files, whose
    import would take longer than everything else at start."""
    kind = config.rope_parameters["rope_type"]
    if kind != "default":
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        return frequencies.float(), float(scaling)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return config.rope_parameters["rope_theta"] ** -exponents, 1.0
