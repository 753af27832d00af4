"""Numbers onto the device without a wait for what is queued there.

A card takes what it is told in order. To copy plain memory to it blocks Python until all before it is done, with which
the drafts ahead would be queued as slowly as they are computed. Pinned memory is copied when its turn comes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def queued(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor [len(numbers)] of them."""
    here = torch.tensor(numbers, dtype=dtype)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
