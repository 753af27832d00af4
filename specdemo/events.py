"""What happens in a lane, as plain values.

Every layer speaks these records: engines yield them, metrics fold them, traces store them, the page and
the terminal draw them. They hold only numbers, strings and tuples, so they pickle, print and compare.
Times are seconds of engine time (the lane's own clock, which stands still while the lane is suspended), or, for a lane
that a server elsewhere decodes, seconds at the client since the request was sent (`Started.clock` says which);
token ids are ints of the target's vocabulary. This is version 1 of the trace format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

TRACE_VERSION = 1

Fate: TypeAlias = Literal["accepted", "rejected", "discarded", "clipped"]
"""accepted: judged and kept; rejected: the first judged and refused; discarded: after the first refusal, never
judged; clipped: cut by EOS, a stop string or the budget before commit, counted nowhere."""

ExtraKind: TypeAlias = Literal["recovered", "bonus"]
"""recovered: drawn from the residual norm(max(0, p - q)) after a rejection; bonus: drawn from p when all K drafted
tokens were accepted (with K = 0, so always in a standard lane, that is the plain next token)."""

FinishReason: TypeAlias = Literal["eos", "stop", "length", "cancelled"]

Clock: TypeAlias = Literal["engine", "client"]
"""engine: the lane's own engine time; client: the wall clock of whoever asked a server, from sending the request."""

UNTOLD = -1
"""The id of a token that a server does not tell: a refused draft, or text that came without ids. It has no text of its
own where it was refused."""

Overlap: TypeAlias = Literal["process", "stream", "card", "none"]
"""How a speculation cache was built beside the verification: by a process on a processor of its own, on a second CUDA
stream, on a card of the draft model's own, or before it, with no overlap at all."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the likeliest tokens at a position: its id, its raw probability (softmax before temperature and
    filters) and its text."""

    id: int
    prob: float
    text: str


@dataclass(frozen=True, slots=True)
class Committed:
    """One token drawn from the target outside a draft: the prefill's token, or a round's extra token.

    `text` is what the token adds to the output ('' while a character is still incomplete). `p` is the probability
    under the distribution that was sampled (None where a server does not tell it), `raw_p` the one before temperature
    and filters.
    """

    id: int
    text: str
    p: float | None
    raw_p: float | None = None
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftedToken:
    """A proposed token: q is the probability under the distribution it was drawn from  (1.0 for a drafter that drew
    nothing, None where a server does not tell it), raw_q the draft model's softmax before temperature and filters,
    `top` its five likeliest tokens."""

    id: int
    text: str
    q: float | None
    raw_q: float | None = None
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class JudgedToken:
    """The verdict on one drafted token.

    `text` is what a kept token adds to the output, or what a refused one would have read as. `acceptance` is the
    probability of being accepted that `uniform` was compared with (accepted when uniform < acceptance); for a
    discarded token under token-wise verification neither was consulted. What a server does not tell is None.
    """

    id: int
    text: str
    fate: Fate
    p: float | None
    q: float | None
    raw_p: float | None
    acceptance: float | None
    uniform: float | None
    top: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """`network_s`: seconds of one trivial request and its answer, measured right before the run, for a lane that a
    server decodes; it is in the time to the first token, and nothing is taken off for it."""

    type: ClassVar[str] = "started"
    lane: str
    t: float
    method: str
    target: str
    target_precision: str
    forward_path: str
    device: str
    settings: Mapping[str, Any]
    prompt_ids: tuple[int, ...]
    draft: str | None = None
    draft_precision: str | None = None
    draft_forward_path: str | None = None
    notes: tuple[str, ...] = ()
    clock: Clock = "engine"
    network_s: float | None = None
    version: int = TRACE_VERSION


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prompt is in the caches and the first token is drawn from the target: exactly one token in every lane."""

    type: ClassVar[str] = "prefilled"
    lane: str
    t: float
    target_s: float
    draft_s: float
    token: Committed


@dataclass(frozen=True, slots=True)
class Drafted:
    """Emitted right before its round's `Verified`, also when the draft is empty (K = 0, no match found)."""

    type: ClassVar[str] = "drafted"
    lane: str
    t: float
    round: int
    tokens: tuple[DraftedToken, ...]
    draft_s: float
    origin: str
    draft_forwards: int = 0


@dataclass(frozen=True, slots=True)
class Guess:
    """One entry of a speculation cache: a verification outcome (num_accepted, id) that was held likely, and the draft
    that was made for it.

    `rank` counts the draft model's choices at that position from 0, the drafted token left out; `text` is the extra
    token's, `draft_text` that of the `draft`, which can be shorter than K or empty where it was given up half way.
    """

    num_accepted: int
    id: int
    rank: int
    text: str = ""
    draft: tuple[int, ...] = ()
    draft_text: str = ""
    taken: bool = False


@dataclass(frozen=True, slots=True)
class Speculation:
    """What was drafted for the next round while this one was verified (SSD).

    fan_out [K + 1]: guesses per position. rank: where the extra token stands among the draft model's choices at its
    position, from 0, the drafted token left out; None far behind. Times are seconds from the moment when the draft
    went to the target: `guessed_s` when the guesses had been chosen, `built_s` when the last of their drafts was made
    or given up, `known_s` when the outcome became known. build_s: the work; hidden_s: the part of it before `known_s`
    that ran beside the target, or of a stream, what that shortened the round by. guesses: empty in a run that is not
    explained.
    """

    fan_out: tuple[int, ...]
    rank: int | None
    guessed_s: float
    built_s: float
    known_s: float
    build_s: float
    hidden_s: float
    overlap: Overlap
    guesses: tuple[Guess, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """One target forward over K + 1 positions, judged and committed.

    `num_accepted` counts the fates "accepted", so it is what was kept. `extra` is None only when the round was
    cut before it (EOS or a stop string inside the draft). SSD: `outcome` is (num_accepted, extra token), `hit` whether
    the cache that was built meanwhile held a draft for it, which is then the next round's.
    """

    type: ClassVar[str] = "verified"
    lane: str
    t: float
    round: int
    verify_s: float
    judge_s: float
    judged: tuple[JudgedToken, ...]
    num_accepted: int
    extra: Committed | None
    extra_kind: ExtraKind | None
    outcome: tuple[int, int] | None = None
    hit: bool | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """Tokens that a server sent in one piece, without a word on how they came about. `text` is what they add to the
    output; where ids did not come along there is one UNTOLD for each token that is known to be in the piece."""

    type: ClassVar[str] = "arrived"
    lane: str
    t: float
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Retold:
    """The server has said at the end how its tokens came about: what has arrived in this lane is told again from here,
    round by round, each at the time at which it arrived. `exact`: nothing in it is a choice among several readings."""

    type: ClassVar[str] = "retold"
    lane: str
    t: float
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Counted:
    """What a server counted over the whole run and does not tell round by round."""

    type: ClassVar[str] = "counted"
    lane: str
    t: float
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Finished:
    """`token_ids` and `text` are the lane's output. They can be shorter than what was committed: a stop string found
    late cuts the text where it begins, and the ids after the token in which it begins. `notes`: sentences about how the
    run was told, known only now."""

    type: ClassVar[str] = "finished"
    lane: str
    t: float
    finish_reason: FinishReason
    token_ids: tuple[int, ...]
    text: str
    metrics: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    type: ClassVar[str] = "failed"
    lane: str
    t: float
    message: str


Event: TypeAlias = Started | Prefilled | Drafted | Verified | Arrived | Retold | Counted | Finished | Failed

EVENT_TYPES: Mapping[str, type[Event]] = {
    cls.type: cls for cls in (Started, Prefilled, Drafted, Verified, Arrived, Retold, Counted, Finished, Failed)
}


def settled(events: Iterable[Event]) -> list[Event]:
    """The events of any lanes as they are known in the end: of a lane that was told again, only the last telling."""
    known = list(events)
    last = {event.lane: index for index, event in enumerate(known) if isinstance(event, Retold)}
    return [
        event for index, event in enumerate(known) if index > last.get(event.lane, -1) or isinstance(event, Started)
    ]
