"""What a user is told about an error in the middle of a run."""

from __future__ import annotations

from .errors import SpecdemoError
from .models.memory import ran_out_of_memory


def failure_message(error: Exception, smaller: str = "use a smaller model") -> str:
    """One sentence for the user about an error in the middle of a run. smaller: what would take less memory."""
    if isinstance(error, SpecdemoError):
        return str(error)
    if ran_out_of_memory(error):
        return f"The memory ran out during the run: ask for fewer new tokens or a shorter prompt, or {smaller}."
    return (
        f"The run stopped with an internal error ({type(error).__name__}: {error}): try again, report it if it stays."
    )
