"""Memory that is no longer needed goes back, and an error says whether it was memory that ran out."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch

_SAYINGS = ("out of memory", "can't allocate memory", "not enough memory")
"""How torch's allocators for the processor and for MPS put it; they raise plain RuntimeErrors."""


def free_memory() -> None:
    """Collect what nothing refers to any more, and hand what the allocators keep for later back to the devices."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the C library is not everywhere the one that has it
        if trim is not None:
            trim(0)


def ran_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(saying in str(error).lower() for saying in _SAYINGS)
