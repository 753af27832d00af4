"""The endpoint for programs: a race as one call of `gradio_client`, checked, limited and lined up as the page's own.

While it waits and runs it yields what there is so far, in the same shape as the result, so that a caller who went away
is noticed; `Client.predict` returns the last. No annotation here may be lazy: Gradio reads the types of `endpoint`.
"""

import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any

import gradio as gr
from gradio.events import api as offer

from ..errors import BadRequest, SpecdemoError
from ..events import Arrived, Committed, Event, Failed, Finished, Prefilled, Retold, Verified
from ..metrics import Fold, first_divergence, speedup, with_baseline
from .access import facts_of
from .assets import strings
from .form import DEFAULTS, race_request
from .gate import address_of
from .view import LANES

PARTIAL_S = 2.0
"""A partial result comes at most this often."""

Turn = Callable[[str, Callable[[], Iterator[str]], Mapping[str, Any], str], Generator[str, None, None]]


class Calls:
    """The calls that are under way. `in_turn(visitor, run, facts, address)` lines a run up, `race` and `check` are the
    arena's, `stop` ends a visitor's run. one_at_a_time: a program may not call again before its call has ended."""

    def __init__(self, arena: Any, in_turn: Turn, stop: Callable[[str], None], one_at_a_time: bool = False) -> None:
        self._arena = arena
        self._in_turn = in_turn
        self._stop = stop
        self._one_at_a_time = one_at_a_time
        self._of: dict[str, set[str]] = {}

    def race(self, session: str, values: Mapping[str, Any], address: str = "") -> Iterator[dict[str, Any]]:
        """The result so far, now and then, and at the end the result. Raises SpecdemoError."""
        request = race_request({**DEFAULTS, **values})
        self._arena.check(request)
        if self._one_at_a_time and session in self._of:
            raise BadRequest(strings()["error_twice"])
        # a program that may call twice at once is several visitors; otherwise it and its page are one
        visitor = session if self._one_at_a_time else f"{session}/{uuid.uuid4().hex}"
        self._of.setdefault(session, set()).add(visitor)
        lanes = {name: _Lane() for name in LANES[:2]}

        facts = facts_of("call", request)

        def run() -> Iterator[str]:
            with closing(self._arena.race(request, visitor)) as events:
                for event in events:
                    lanes.setdefault(event.lane, _Lane()).add(event)
                    yield ""
            facts["tokens"] = sum(len(lane.token_ids) for lane in lanes.values())

        try:
            told = time.monotonic()
            with closing(self._in_turn(visitor, run, facts, address)) as steps:
                for _ in steps:
                    if time.monotonic() - told > PARTIAL_S:
                        told = time.monotonic()
                        yield _result(lanes)
            if not all(lane.finish_reason for lane in lanes.values()):
                raise SpecdemoError(strings()["wait_stopped"])
            yield _result(lanes)
        finally:
            self._of[session].discard(visitor)
            if not self._of[session]:
                del self._of[session]

    def gone(self, session: str) -> None:
        """The program that made them has ended or closed its client."""
        for visitor in list(self._of.get(session, ())):
            self._stop(visitor)


class _Lane:
    """What a lane has written."""

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.fold = Fold()

    def add(self, event: Event) -> None:
        """Raises SpecdemoError when the lane has failed."""
        self.fold.add(event)
        match event:
            case Prefilled():
                self._commit(event.token)
            case Verified():
                for token in event.judged:
                    if token.fate == "accepted":
                        self.text += token.text
                        self.token_ids.append(token.id)
                if event.extra is not None:
                    self._commit(event.extra)
            case Arrived():
                self.text += event.text
                self.token_ids += event.tokens
            case Retold():
                self.text, self.token_ids = "", []
            case Finished():
                self.text, self.token_ids = event.text, list(event.token_ids)
                self.finish_reason = event.finish_reason
            case Failed():
                raise SpecdemoError(event.message)

    def _commit(self, token: Committed) -> None:
        self.text += token.text
        self.token_ids.append(token.id)


def _result(lanes: Mapping[str, _Lane]) -> dict[str, Any]:
    names = list(lanes)
    first, last = lanes[names[0]], lanes[names[-1]]
    baseline = first.fold.metrics()
    metrics = {name: with_baseline(lane.fold.metrics(), baseline) for name, lane in lanes.items()}
    lane_results = {
        name: {
            "text": lane.text,
            "token_ids": lane.token_ids,
            "finish_reason": lane.finish_reason,
            "metrics": asdict(metrics[name]),
        }
        for name, lane in lanes.items()
    }
    count = min(len(first.token_ids), len(last.token_ids))
    ended = all(lane.finish_reason not in (None, "cancelled") for lane in (first, last))
    end = None if ended else count  # of a lane that runs or was stopped, only what both have can be compared
    return {
        **lane_results,
        "speedup": speedup(baseline, metrics[names[-1]]),
        "first_divergence": first_divergence(first.token_ids[:end], last.token_ids[:end]),
    }


def register(calls: Calls, **options: Any) -> None:
    """Offer the endpoint `/race` of the page that is being built; `options` are those of `gr.api`."""

    def endpoint(
        request: gr.Request,
        prompt: str,
        method: str = DEFAULTS["method"],
        draft_length: int = DEFAULTS["draft_length"],
        max_new_tokens: int = DEFAULTS["max_new_tokens"],
        temperature: float = DEFAULTS["temperature"],
        seed: int = DEFAULTS["seed"],
    ) -> Any:
        values = {
            "prompt": prompt,
            "method": method,
            "draft_length": draft_length,
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
        }
        try:
            yield from calls.race(request.session_hash or "", values, address_of(request))
        except SpecdemoError as error:
            raise gr.Error(str(error), print_exception=False) from None

    endpoint.__annotations__["return"] = dict[str, Any]  # what a program gets is the last one
    offer(endpoint, api_name="race", api_description=DESCRIPTION, **options)


DESCRIPTION = (
    "Race standard against speculative decoding. Only the prompt is needed. method: speculative, prompt-lookup, "
    "hybrid or ssd; draft_length: tokens drafted a round (0 to 16); max_new_tokens: tokens to write at most; "
    "temperature: 0 is greedy; seed: equal seeds repeat. Returns standard and speculative, and ssd where that is the "
    "method, each with text, token_ids, finish_reason and metrics, besides speedup (standard time per token over the "
    "last one's) and first_divergence (index of the first token in which those two differ, or null)."
)
