"""A link that brings back a prompt and its settings: the form's fields in the query of the page's address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..errors import BadRequest
from ..request import RaceRequest
from .assets import strings
from .form import DEFAULTS, race_request

FIELDS = ("prompt", *DEFAULTS)

_PLACEHOLDER = "?"
"""Stands for the prompt where a link has none: its settings are checked all the same."""


def restored(query: Mapping[str, str], check: Callable[[RaceRequest], None]) -> dict[str, Any] | None:
    """The form's values by a link, None where the address says nothing about them; what else the address holds is left
    aside. `check` is the arena's. Raises BadRequest for what the form would refuse too."""
    told = {name: query[name] for name in FIELDS if name in query}
    if not told:
        return None
    values = {"prompt": "", **DEFAULTS, **{name: _value(name, text) for name, text in told.items()}}
    check(race_request({**values, "prompt": values["prompt"] or _PLACEHOLDER}))
    return values


def _value(name: str, text: str) -> Any:
    usual = DEFAULTS.get(name, "")
    if isinstance(usual, bool):
        flags = {"true": True, "false": False}
        if text.lower() not in flags:
            raise BadRequest(strings()["error_flag"].format(name=strings()[f"{name}_label"]))
        return flags[text.lower()]
    if isinstance(usual, int | float):
        try:
            return int(text) if text.lstrip("-").isdecimal() else float(text)
        except ValueError:
            raise BadRequest(strings()["error_value"].format(name=strings()[f"{name}_label"])) from None
    return text
