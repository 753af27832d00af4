"""Events in, page records out.

The page draws a race from an append-only log with one JSON record a line. This reducer writes that log: it decides what
was kept and what became of every drafted token, takes every number from `metrics`, and knows nothing of Gradio, of
models or of pixels. The page's script replays the same records, so whatever the log says can be drawn again later.

Records of a race; `k` is the kind, `l` the lane's index in LANES, `t` seconds of that lane's engine time:

    race     budget, greedy, prompt: all lanes start empty
    lane     method, rule (verification: token or block), target, precision, path, device, draft, notes: what runs here;
             of a lane that a server decodes also clock ("client") and network (seconds of a trivial request)
    first    x: text of the token drawn by the prefill, s: seconds of its phases [draft, verify, judge]
    round    n: round, j: [[text, fate], ...] of the drafted tokens, x: text of the extra token, e: its kind where the
             round had a draft, s: seconds of its phases, c: the lane's tokens so far; fates are a(ccepted), r(ejected),
             d(iscarded), c(lipped)
    why      what a reader who asks about a token of that round is told: see `why`
    piece    x: text that arrived in one piece from a server, c: the lane's tokens so far
    retold   what has arrived in this lane is told again from here, round by round
    cache    what was drafted for the next round while that one was verified: see `speculated`
    numbers  tokens, rounds, tps, ttft, acceptance, alpha, length, hits: the lane's metrics so far, null where undefined
    ratio    v: the speedup so far, null before both lanes have tokens enough; w: where three lanes race, that of the
             last over the one in the middle
    same     greedy races only, of the first lane and the last. n: tokens compared, at: null or the index of the first
             difference, a, b: [id, text] of
             both lanes there, gaps: how far apart each lane's target saw their logits, null where one is not among
             its likeliest, numerics: rounding can explain it, final: both lanes are done, cut: one was stopped,
             served: servers decode, whose precision is not known
    twin     the same fields, of SSD and speculative decoding in a sampled race in which both draw alike
    insight  what the whole race teaches: the fields of `insight.Insight`, the histogram of accepted lengths, and the
             acceptance by position
    ssd      what the lane that drafts while it verifies teaches: the fields of `ssd_insight.SsdInsight`
    projection  what a device for each model would make of it: see `projected`
    end      why, keep, add: the lane's output is the first `keep` UTF-16 units of what was drawn as kept, then `add`;
             notes: sentences about how it was told
    failed   message
    done     ok: nothing follows

The text is plain ASCII (everything else is escaped, `<` too), so a cut in the log is never inside a character.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..errors import BadRequest
from ..events import (
    UNTOLD,
    Arrived,
    Candidate,
    Committed,
    Drafted,
    Event,
    Failed,
    Finished,
    JudgedToken,
    Prefilled,
    Retold,
    Started,
    Verified,
)
from ..insight import insight
from ..metrics import Fold, Metrics, first_divergence, logit_gap, speedup
from ..ssd_insight import SsdFold, ssd_insight
from .projected import projected
from .records import record, significant
from .speculated import speculated
from .why import why_first, why_round

LANES = ("standard", "speculative", "ssd")
"""The last one only where it runs, beside both that it is measured against."""

TOKENS_FOR_SPEEDUP = 8
"""Fewer tokens than this in either lane say little about its speed, so a running race shows no speedup yet."""

GHOST = "□"
"""Stands for a refused draft that a server counts and does not spell out."""

_FATES = {"accepted": "a", "rejected": "r", "discarded": "d", "clipped": "c"}


class _Lane:
    """What one lane has shown so far."""

    def __init__(self) -> None:
        self.started = False
        self.fold = Fold()
        self.metrics: Metrics = self.fold.metrics()  # as last shown
        self.shown = ""  # the kept text as drawn
        self.tokens: list[tuple[int, str]] = []  # committed: id and text
        self.tops: list[Sequence[Candidate]] = []  # the target's likeliest at each of them
        self.t = 0.0
        self.exact = False  # float32: greedy lanes must agree
        self.served = False
        self.residual = False  # a recovered token is drawn from p - q
        self.plain = False  # proposes what the draft model would alone: with equal seeds such lanes draw alike
        self.drafted: Drafted | None = None  # of the round that is not verified yet
        self.drafting_rounds = 0
        self.ended = False
        self.cut = False  # stopped before its end
        self.dirty = False  # numbers not shown yet

    def commit(self, token: Committed | JudgedToken) -> None:
        self.tokens.append((token.id, token.text))
        self.tops.append(token.top)
        self.shown += token.text

    def arrive(self, event: Arrived) -> None:
        texts = [event.text] + [""] * len(event.tokens)
        self.tokens += zip(event.tokens, texts, strict=False)
        self.tops += [()] * len(event.tokens)
        self.shown += event.text

    def tell_again(self) -> None:
        """From its first token on."""
        self.tokens, self.tops, self.shown, self.drafting_rounds = [], [], "", 0


class RaceView:
    """Reduces the events of one race. `add` takes them in any interleaving, `flush` returns the log's next piece."""

    def __init__(self, budget: int, greedy: bool, prompt: str = "") -> None:
        self._lanes = {name: _Lane() for name in LANES}
        self._ssd = SsdFold()
        self._events: list[Event] = []
        self._greedy = greedy
        self._ratios: dict[str, float | None] = {"v": None}
        self._lines = [record("race", budget=budget, greedy=greedy, prompt=prompt)]

    def add(self, event: Event) -> None:
        """Take one event. Raises KeyError for a lane that the page does not have, BadRequest for a round of which the
        draft is missing: a trace that was edited or cut."""
        lane = self._lanes[event.lane]
        lane.fold.add(event)
        self._events.append(event)
        if event.lane == LANES[2]:
            self._ssd.add(event)
        lane.t, lane.dirty = event.t, True
        where: dict[str, Any] = {"l": LANES.index(event.lane), "t": _time(event.t)}
        match event:
            case Started():
                lane.started = True
                lane.exact = event.target_precision == "float32"
                lane.served = event.clock == "client"
                lane.plain = _proposes_plainly(event)
                lane.residual = not (self._greedy or lane.served or event.settings.get("verification") == "block")
                self._lines.append(record("lane", **where, **_what_runs(event)))
            case Prefilled():
                lane.commit(event.token)
                phases = _seconds(event.draft_s, event.target_s, 0.0)
                self._lines.append(record("first", **where, x=event.token.text, s=phases))
                self._lines.append(record("why", **where, **why_first(event)))
            case Drafted():
                lane.drafted = event  # its tokens come again, judged, in the same round
                lane.drafting_rounds += bool(event.tokens)
            case Verified():
                drafted = _draft_of(event, lane.drafted)
                phases = _seconds(drafted.draft_s, event.verify_s, event.judge_s)
                self._lines.append(record("round", **where, n=event.round, s=phases, **_round(lane, event)))
                self._lines.append(record("why", **where, **why_round(drafted, event, lane.residual)))
                if event.speculation is not None:
                    self._lines.append(record("cache", **where, **speculated(event)))
            case Arrived():
                lane.arrive(event)
                self._lines.append(record("piece", **where, x=event.text, c=len(lane.tokens)))
            case Retold():
                lane.tell_again()
                self._lines.append(record("retold", **where))
            case Finished():
                lane.ended, lane.cut = True, event.finish_reason == "cancelled"
                keep = _common_prefix(lane.shown, event.text)
                add = event.text[keep:]
                notes = {"notes": list(event.notes)} if event.notes else {}
                length = _utf16_length(event.text[:keep])
                self._lines.append(record("end", **where, why=event.finish_reason, keep=length, add=add, **notes))
                lane.shown = event.text
                del lane.tokens[len(event.token_ids) :]
            case Failed():
                lane.ended = lane.cut = True
                self._lines.append(record("failed", **where, message=event.message))

    def flush(self) -> str:
        """The records of the events since the last flush, the numbers after them."""
        if any(lane.dirty for lane in self._lanes.values()):
            self._numbers()
        text, self._lines = "".join(self._lines), []
        return text

    def done(self, ok: bool = True) -> str:
        """The log's last piece."""
        return self.flush() + self._insight() + self._ssd_insight() + record("done", ok=ok)

    def text(self, lane: str) -> str:
        """The kept text of a lane as the page shows it."""
        return self._lanes[lane].shown

    @property
    def _ends(self) -> tuple[_Lane, _Lane]:
        """The baseline, and the lane that the race is about."""
        standard, speculative, ssd = self._lanes.values()
        return standard, ssd if ssd.started else speculative

    def _insight(self) -> str:
        standard, subject = self._ends
        found = insight(standard.metrics, subject.metrics, subject.drafting_rounds)
        if found is None:
            return ""
        shown = _rounded(asdict(found))
        metrics = subject.metrics
        positions = _rounded(metrics.acceptance_by_position)
        return record("insight", **shown, histogram=metrics.accepted_histogram, positions=positions)

    def _ssd_insight(self) -> str:
        _, speculative, ssd = self._lanes.values()
        found = ssd_insight(self._ssd, ssd.metrics, speculative.metrics if speculative.started else None)
        if found is None:
            return ""
        told = [record("projection", **fields) for fields in projected(self._events)]
        return record("ssd", **_rounded(asdict(found))) + "".join(told)

    def _numbers(self) -> None:
        for index, lane in enumerate(self._lanes.values()):
            if lane.dirty:
                lane.dirty, lane.metrics = False, lane.fold.metrics()
                self._lines.append(record("numbers", l=index, t=_time(lane.t), **_shown(lane.metrics)))
        standard, subject = self._ends
        ratios = {"v": _ratio(standard, subject)}
        middle = self._lanes[LANES[1]]
        if subject is not middle and middle.started:
            ratios["w"] = _ratio(middle, subject)
        if ratios != self._ratios:
            self._ratios = ratios
            self._lines.append(record("ratio", **ratios))
        if self._greedy:
            self._compare("same", standard, subject)
        elif middle is not subject and middle.plain and subject.plain:
            self._compare("twin", middle, subject)

    def _compare(self, kind: str, standard: _Lane, subject: _Lane) -> None:
        count = min(len(standard.tokens), len(subject.tokens))
        if not count:
            return
        if any(token_id == UNTOLD for lane in (standard, subject) for token_id, _ in lane.tokens[:1]):
            return  # without ids there is nothing to compare token by token
        ended, cut = standard.ended and subject.ended, standard.cut or subject.cut
        # of lanes that run or were stopped one is ahead: only what both have can be compared
        end = None if ended and not cut else count
        ids_a, ids_b = ([token_id for token_id, _ in lane.tokens[:end]] for lane in (standard, subject))
        at = first_divergence(ids_a, ids_b)
        fields: dict[str, Any] = {"n": count, "at": at, "final": ended, "cut": cut}
        if at is not None:
            fields["a"] = standard.tokens[at] if at < len(standard.tokens) else None
            fields["b"] = subject.tokens[at] if at < len(subject.tokens) else None
            if fields["a"] and fields["b"]:
                ids = fields["a"][0], fields["b"][0]
                fields["gaps"] = [significant(logit_gap(lane.tops[at], *ids), 3) for lane in (standard, subject)]
            fields["numerics"] = not (standard.exact and subject.exact)
        if standard.served or subject.served:
            fields["served"] = True
        self._lines.append(record(kind, **fields))


def _ratio(baseline: _Lane, lane: _Lane) -> float | None:
    """How many times faster the lane is, None before both have tokens enough."""
    enough = 2 if baseline.ended and lane.ended else TOKENS_FOR_SPEEDUP
    if min(len(baseline.tokens), len(lane.tokens)) < enough:
        return None
    return significant(speedup(baseline.metrics, lane.metrics))


def _proposes_plainly(event: Started) -> bool:
    """Whether the lane's proposals are the draft model's own, as many a round as any such lane's."""
    told = event.settings
    if event.method == "ssd" and (told.get("saguaro", 1.0) < 1.0 or told.get("fallback") == "prompt-lookup"):
        return False
    by_draft_model = event.method in ("speculative", "ssd")
    return by_draft_model and not told.get("adaptive") and told.get("verification") != "block"


def _what_runs(event: Started) -> dict[str, Any]:
    return {
        "method": event.method,
        "rule": event.settings.get("verification", "token"),
        "target": event.target,
        "precision": event.target_precision,
        "path": event.forward_path,
        "device": event.device,
        "draft": [event.draft, event.draft_precision, event.draft_forward_path] if event.draft else None,
        "notes": list(event.notes),
        **({"clock": event.clock, "network": significant(event.network_s)} if event.clock == "client" else {}),
    }


def _draft_of(verified: Verified, drafted: Drafted | None) -> Drafted:
    if drafted is None or drafted.round != verified.round or len(drafted.tokens) != len(verified.judged):
        raise BadRequest(f"Round {verified.round} of the {verified.lane} lane was judged, but its draft is missing.")
    return drafted


def _round(lane: _Lane, event: Verified) -> dict[str, Any]:
    for token in event.judged:
        if token.fate == "accepted":
            lane.commit(token)
    texts = [GHOST if token.id == UNTOLD else token.text for token in event.judged]
    fields: dict[str, Any] = {"j": [[text, _FATES[t.fate]] for text, t in zip(texts, event.judged, strict=True)]}
    extra: Committed | None = event.extra
    if extra is not None:
        lane.commit(extra)
        fields["x"] = extra.text
        if event.judged:  # without a draft the extra token is the plain next token
            fields["e"] = event.extra_kind
    return {**fields, "c": len(lane.tokens)}


def _shown(metrics: Metrics) -> dict[str, Any]:
    return {
        "tokens": metrics.tokens,
        "rounds": metrics.rounds if metrics.rounds or metrics.tokens < 2 else None,
        "tps": significant(metrics.tokens_per_second),
        "ttft": significant(metrics.ttft_s),
        "acceptance": significant(metrics.acceptance_rate),
        "alpha": significant(metrics.alpha),
        "length": significant(metrics.mean_acceptance_length),
        "hits": significant(metrics.hit_rate),
    }


def _seconds(*phases: float) -> list[float]:
    return [round(seconds, 6) for seconds in phases]


def _rounded(value: Any) -> Any:
    """Every float in it short enough to send."""
    if isinstance(value, float):
        return significant(value)
    if isinstance(value, Mapping):
        return {name: _rounded(item) for name, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _time(t: float) -> float:
    return round(t, 4)


def _common_prefix(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _utf16_length(text: str) -> int:
    """Length as the browser counts it."""
    return len(text.encode("utf-16-le", "surrogatepass")) // 2
