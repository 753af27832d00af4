"""How a run decodes: one flat, frozen record, checked once, that every layer passes on unchanged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from .errors import BadRequest

Verification: TypeAlias = Literal["token", "block"]
FanOut: TypeAlias = Literal["likeliest", "geometric", "uniform"]
Fallback: TypeAlias = Literal["draft-model", "prompt-lookup"]

MAX_DRAFT_LENGTH = 16
MAX_FAN_OUT_BUDGET = 64
MAX_SEED = 2**63 - 1
LEAST_TEMPERATURE = 1e-6  # below it, logits over temperature leave float32


@dataclass(frozen=True, slots=True)
class Settings:
    """Decoding settings of one run.

    temperature 0 is greedy. top_k 0, top_p 1.0, min_p 0.0 and repetition_penalty 1.0 are off. The filters apply in
    this order: repetition penalty, temperature, top-k, top-p, min-p, as in transformers' `generate`, to target and
    draft model alike. draft_length is K; with `adaptive` it is the longest K used. Raises BadRequest.

    SSD: `fan_out_budget` outcomes of a verification get a draft, spread over the positions by the rule `fan_out`
    (`ssd.fan_out`); `saguaro` is C of `ssd.saguaro`, 1.0 is off; `fallback` drafts where no outcome was guessed right:
    the draft model, or prompt lookup with the draft model behind it.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft_length: int = 5
    adaptive: bool = False
    verification: Verification = "token"
    fan_out: FanOut = "likeliest"
    fan_out_budget: int = 16
    saguaro: float = 1.0
    fallback: Fallback = "draft-model"

    def __post_init__(self) -> None:
        _require_int("max new tokens", self.max_new_tokens, 1, 1_000_000)
        _require_real("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            raise BadRequest(f"The temperature must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}.")
        _require_int("top-k", self.top_k, 0, 10_000_000)
        _require_real("top-p", self.top_p, 0.0, 1.0, above=True)
        _require_real("min-p", self.min_p, 0.0, 1.0)
        _require_real("repetition penalty", self.repetition_penalty, 0.01, 10.0)
        _require_int("seed", self.seed, 0, MAX_SEED)
        _require_int("draft length", self.draft_length, 0, MAX_DRAFT_LENGTH)
        for name, flag in (("ignore-eos", self.ignore_eos), ("adaptive", self.adaptive)):
            if not isinstance(flag, bool):
                raise BadRequest(f"The {name} setting must be true or false, not {flag!r}.")
        if self.verification not in ("token", "block"):
            raise BadRequest(f"Verification must be 'token' or 'block', not {self.verification!r}.")
        if self.fan_out not in get_args(FanOut):
            raise BadRequest(f"The fan-out must be {' or '.join(map(repr, get_args(FanOut)))}, not {self.fan_out!r}.")
        _require_int("fan-out budget", self.fan_out_budget, 1, MAX_FAN_OUT_BUDGET)
        _require_real("saguaro factor", self.saguaro, 0.0, 1.0, above=True)
        if self.fallback not in get_args(Fallback):
            raise BadRequest(f"The fallback must be 'draft-model' or 'prompt-lookup', not {self.fallback!r}.")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) and text for text in self.stop):
            raise BadRequest("Each stop string must be a text of at least one character.")
        if any("\ud800" <= char <= "\udfff" for text in self.stop for char in text):
            raise BadRequest("A stop string contains half a character (a lone surrogate): remove it and try again.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"The {name} must be a whole number from {low} to {high}, not {value!r}.")


def _require_real(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise BadRequest(f"The {name} must be a number, not {value!r}.")
    if value > high or value < low or (above and value == low):
        wanted = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise BadRequest(f"The {name} must be {wanted}, not {value!r}.")
