"""What a user is told about an error in the middle of a run."""

from __future__ import annotations

import torch

from .errors import SpecdemoError


def failure_message(error: Exception) -> str:
    """One sentence for the user about an error in the middle of a run."""
    if isinstance(error, SpecdemoError):
        return str(error)
    if isinstance(error, torch.cuda.OutOfMemoryError | MemoryError):
        return (
            "The memory ran out during the run: ask for fewer new tokens or a shorter prompt, or use a smaller model."
        )
    return (
        f"The run stopped with an internal error ({type(error).__name__}: {error}): try again, report it if it stays."
    )
