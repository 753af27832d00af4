"""A race as it is asked for, and how those who run it are: what the page and every arena speak of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .errors import BadRequest
from .limits import Limits
from .settings import Settings
from .text import check_prompt


@dataclass(frozen=True, slots=True)
class RaceRequest:
    """What a visitor asks for."""

    prompt: str
    settings: Settings = field(default_factory=Settings)
    method: str = "speculative"
    raw: bool = False


@dataclass(frozen=True, slots=True)
class Status:
    state: Literal["loading", "ready", "busy", "failed"]
    message: str
    progress: float = 1.0


def check_size(request: RaceRequest, limits: Limits) -> None:
    """Whether a race asks for no more than it may. Raises BadRequest."""
    check_prompt(request.prompt)
    if len(request.prompt) > limits.prompt_characters:
        raise BadRequest(
            f"The prompt has {len(request.prompt):,} characters and the limit is {limits.prompt_characters:,}: "
            "shorten it."
        )
    if request.settings.max_new_tokens > limits.max_new_tokens:
        raise BadRequest(
            f"At most {limits.max_new_tokens} new tokens can be asked for, not {request.settings.max_new_tokens}."
        )
