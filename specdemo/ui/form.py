"""What was asked for, as a checked request: from the form, from a link, from a program. Nothing here is trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import BadRequest
from ..request import RaceRequest
from ..settings import Settings
from .assets import strings

DEFAULTS: Mapping[str, Any] = {
    "method": "speculative",
    "draft_length": 5,
    "max_new_tokens": 128,
    "temperature": 0,
    "top_p": 1,
    "seed": 0,
    "top_k": 0,
    "min_p": 0,
    "repetition_penalty": 1,
    "stop": "",
    "adaptive": False,
    "verification": "token",
    "fan_out": "likeliest",
    "fan_out_budget": 16,
    "saguaro": 1,
    "fallback": "draft-model",
    "raw": False,
    "ignore_eos": False,
}
"""The fields beside the prompt, and what they are when nobody says otherwise."""

_LONGEST_NUMBER = 10**20
_LONGEST_CHOICE = 40


def race_request(values: Mapping[str, Any]) -> RaceRequest:
    """Raw values, the prompt's and one for each of DEFAULTS, as a request. Raises BadRequest: what is no fit value here
    or in `Settings`."""
    prompt, method, stop = (_text(values, name) for name in ("prompt", "method", "stop"))
    if not isinstance(values.get("raw"), bool):
        raise BadRequest(strings()["error_flag"].format(name=strings()["raw_label"]))
    names = (
        "draft_length",
        "max_new_tokens",
        "top_k",
        "seed",
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "adaptive",
        "verification",
        "fan_out",
        "fan_out_budget",
        "saguaro",
        "fallback",
        "ignore_eos",
    )
    settings = Settings(
        **{name: _plain(values, name) for name in names},
        stop=tuple(line for line in stop.split("\n") if line),
    )
    return RaceRequest(prompt=prompt, settings=settings, method=method, raw=values["raw"])


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise BadRequest(strings()["error_text"].format(name=strings()[f"{name}_label"]))
    return value


def _plain(values: Mapping[str, Any], name: str) -> Any:
    """A number, a flag or a short word, fit to be repeated in a message; 5.0 as 5, since JSON from a browser does not
    tell them apart."""
    value = values.get(name)
    long = len(value) > _LONGEST_CHOICE if isinstance(value, str) else False
    large = isinstance(value, int) and abs(value) > _LONGEST_NUMBER
    if long or large or not isinstance(value, int | float | str | None):
        raise BadRequest(strings()["error_value"].format(name=strings()[f"{name}_label"]))
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < _LONGEST_NUMBER else value
