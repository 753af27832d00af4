"""What a comparison of methods tells, as plain values: how far it is, what each method was worth, which was fastest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .events import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """A command or some lines of code. `own_draft`: it holds `elsewhere.STAND_IN`, and has to be replaced."""

    program: str
    code: str
    own_draft: bool = False


@dataclass(frozen=True, slots=True)
class Progress:
    """`method` is running, number `index` of `count`; share: how much of its tokens it has written, 0 to 1."""

    method: str
    index: int
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Row:
    """What one method was worth; `reason` is a sentence where it could not run, and then nothing else is known.

    equal: whether its ids are the standard lane's, for greedy runs that were not stopped. The rest as in `Metrics`.
    """

    method: str
    reason: str | None = None
    path: str | None = None
    precision: str | None = None
    tokens: int = 0
    tokens_per_second: float | None = None
    ttft_s: float | None = None
    speedup: float | None = None
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    finish_reason: FinishReason | None = None
    equal: bool | None = None


@dataclass(frozen=True, slots=True)
class Winner:
    """The fastest method of those that ran to their end, and how the same is had in other programs."""

    method: str
    speedup: float | None
    usages: tuple[Usage, ...]


Comparison: TypeAlias = Progress | Row | Winner
