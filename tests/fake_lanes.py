"""Scripted races for tests of the page: an arena without models that tells a story event by event."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specdemo.arena import RaceRequest
from specdemo.comparison import Comparison, Progress, Row, Winner
from specdemo.elsewhere import Usage
from specdemo.errors import BadRequest
from specdemo.events import (
    Committed,
    Drafted,
    DraftedToken,
    Event,
    ExtraKind,
    Fate,
    Finished,
    FinishReason,
    JudgedToken,
    Prefilled,
    Started,
    Verified,
)

Judged = Sequence[tuple[str, Fate]]


@dataclass
class Script:
    """The events of one lane, told round by round. Token ids are made up from the texts, engine time from the costs."""

    lane: str
    precision: str = "float32"
    notes: tuple[str, ...] = ()
    seconds_a_round: float = 0.02
    settings: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.t = 0.0
        self.text = ""
        self.ids: list[int] = []
        self.rounds = 0
        self.events: list[Event] = []

    def start(self) -> Script:
        method = {"standard": "standard", "speculative": "prompt-lookup"}.get(self.lane, self.lane)
        self.events.append(
            Started(
                lane=self.lane,
                t=0.0,
                method=method,
                target="tiny-target",
                target_precision=self.precision,
                forward_path="lean",
                device="cpu",
                settings=self.settings,
                prompt_ids=(1, 2, 3),
                notes=self.notes,
            )
        )
        return self

    def first(self, text: str) -> Script:
        self.t += 0.05
        token = self._commit(text)
        self.events.append(Prefilled(lane=self.lane, t=self.t, target_s=0.05, draft_s=0.0, token=token))
        return self

    def round(self, judged: Judged = (), extra: str | None = None, kind: ExtraKind = "bonus") -> Script:
        self.rounds += 1
        self.t += self.seconds_a_round
        tokens = tuple(DraftedToken(id=_id(text), text=text, q=1.0) for text, _ in judged)
        verdicts = tuple(
            JudgedToken(id=_id(text), text=text, fate=fate, p=0.5, q=1.0, raw_p=0.5, acceptance=0.5, uniform=0.25)
            for text, fate in judged
        )
        for text, fate in judged:
            if fate == "accepted":
                self._commit(text)
        token = self._commit(extra) if extra is not None else None
        self.events.append(
            Drafted(lane=self.lane, t=self.t, round=self.rounds, tokens=tokens, draft_s=0.001, origin="lookup")
        )
        self.events.append(
            Verified(
                lane=self.lane,
                t=self.t,
                round=self.rounds,
                verify_s=self.seconds_a_round - 0.002,
                judge_s=0.001,
                judged=verdicts,
                num_accepted=sum(fate == "accepted" for _, fate in judged),
                extra=token,
                extra_kind=kind if token else None,
            )
        )
        return self

    def finish(self, why: FinishReason = "eos", text: str | None = None, tokens: int | None = None) -> Script:
        self.events.append(
            Finished(
                lane=self.lane,
                t=self.t,
                finish_reason=why,
                token_ids=tuple(self.ids[:tokens]),
                text=self.text if text is None else text,
            )
        )
        return self

    def _commit(self, text: str) -> Committed:
        self.text += text
        self.ids.append(_id(text))
        return Committed(id=_id(text), text=text, p=0.5)


def _id(text: str) -> int:
    """The same made-up token id for the same text, everywhere."""
    return int.from_bytes(text.encode("utf-8", "surrogatepass")[:6], "big") % 49_152


def interleaved(*lanes: Script) -> list[Event]:
    """The events of several lanes as a race would have them: the lane with the least engine time goes next."""
    order = [(event.t, number, event) for lane in lanes for number, event in enumerate(lane.events)]
    return [event for _, _, event in sorted(order, key=lambda item: item[:2])]


def echo_race(words: Sequence[str], precision: str = "float32", notes: tuple[str, ...] = ()) -> list[Event]:
    """Both lanes write `words`; the right one with drafts of three, some of them refused."""
    standard = Script("standard", precision, notes, seconds_a_round=0.04).start().first(words[0])
    for word in words[1:]:
        standard.round(extra=word)
    standard.finish()
    speculative = Script("speculative", precision, notes, seconds_a_round=0.05).start().first(words[0])
    rest, refuse = list(words[1:]), False
    while rest:
        if len(rest) >= 4 and refuse:
            speculative.round(
                [(rest[0], "accepted"), (" wrong", "rejected"), (" unseen", "discarded")], rest[1], "recovered"
            )
            rest = rest[2:]
        elif len(rest) >= 4:
            speculative.round([(word, "accepted") for word in rest[:3]], rest[3])
            rest = rest[4:]
        else:
            speculative.round(extra=rest[0])
            rest = rest[1:]
        refuse = not refuse
    speculative.finish()
    return interleaved(standard, speculative)


COMPARED = (
    Row("standard", path="lean", precision="float32", tokens=9, tokens_per_second=10.0, speedup=1.0, equal=True),
    Row("hf", path="generate", precision="float32", tokens=9, tokens_per_second=4.0, speedup=0.4, equal=False),
    Row("prompt-lookup", tokens=9, tokens_per_second=20.0, speedup=2.0, acceptance_rate=0.5, equal=True),
    Row("hf-assisted", reason="<b>There is no draft model.</b>"),
)
"""What every scripted comparison finds."""


@dataclass(frozen=True)
class FakeStatus:
    state: str
    message: str = ""
    progress: float = 1.0


class FakeArena:
    """Races without models: the prompt repeated by both lanes, or the events set for it in `scripts`. The prompt
    "slow" lasts until it is stopped, "crash" raises."""

    def __init__(self, seconds_an_event: float = 0.002) -> None:
        self.status = FakeStatus("ready", "tiny-target on cpu")
        self.seconds_an_event = seconds_an_event
        self.requests: list[RaceRequest] = []
        self.scripts: dict[str, list[Event]] = {}
        self.running = 0
        self.most_running = 0
        self.pair = None
        self.ran_out = False
        self._stop = threading.Event()
        self._visitor: str | None = None
        self._lock = threading.Lock()

    def stop(self, visitor: str = "") -> bool:
        if visitor == self._visitor:
            self._stop.set()
        return visitor == self._visitor

    def start_switching(self, load: object) -> None:
        """A scripted arena has no models."""

    def cancel_loading(self) -> None:
        """Nor does it load any."""

    def check(self, request: RaceRequest) -> None:
        if not request.prompt.strip():
            raise BadRequest("The prompt is empty: type something first.")

    def race(self, request: RaceRequest, visitor: str = "") -> Iterator[Event]:
        prompt = request.prompt
        self.requests.append(request)
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            self._visitor = visitor
            self._stop.clear()
        try:
            yield from self._tell(prompt)
        finally:
            with self._lock:
                self.running -= 1
                self._visitor = None

    def compare(self, request: RaceRequest, visitor: str = "") -> Iterator[Comparison]:
        """Three methods, one of which cannot run; the prompt "slow" runs until it is stopped, "crash" raises."""
        self._visitor = visitor
        self._stop.clear()
        try:
            if request.prompt == "crash":
                raise RuntimeError("scripted fault")
            for index, row in enumerate(COMPARED):
                yield Progress(row.method, index, len(COMPARED), 0.5)
                while request.prompt == "slow" and not self._stop.is_set():
                    time.sleep(0.02)
                    yield Progress(row.method, index, len(COMPARED), 0.5)
                if self._stop.is_set():
                    return
                time.sleep(self.seconds_an_event)
                yield row
            yield Winner("prompt-lookup", 2.0, (Usage("vLLM", f"vllm serve {request.prompt}", True),))
        finally:
            self._visitor = None

    def _tell(self, prompt: str) -> Iterator[Event]:
        if prompt == "crash":
            yield from Script("standard").start().events
            raise RuntimeError("scripted fault")
        if prompt == "slow":
            yield from self._slowly()
            return
        words = prompt.split(" ")
        words[1:] = [f" {word}" for word in words[1:]]
        for event in self.scripts.get(prompt) or echo_race(words, notes=("Scripted for a test.",)):
            time.sleep(self.seconds_an_event)
            yield event

    def _slowly(self) -> Iterator[Event]:
        lanes = [Script("standard").start().first("tick"), Script("speculative").start().first("tick")]
        sent = 0
        while not self._stop.is_set() and sent < 4000:
            for lane in lanes:
                lane.round([(" tick", "accepted")], " tock") if lane.lane == "speculative" else lane.round(
                    extra=" tock"
                )
                yield from lane.events[:]
                lane.events.clear()
                sent += 1
                time.sleep(0.01)
        for lane in lanes:
            lane.finish("cancelled")
            yield from lane.events
