"""Every method that can run, one after the other on one prompt: which is fastest here, and by how much.

Each method runs once, alone, so no lane waits for another; transformers' own `generate` runs too, as the yardstick that
everybody has. One run says something about this prompt on this machine at this minute; `bench` measures over many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from . import methods
from .compared import Comparison, Progress, Row, Winner
from .elsewhere import usages
from .errors import SpecdemoError
from .events import Event, Finished, FinishReason
from .failures import failure_message
from .metrics import Fold, Metrics, first_divergence, speedup
from .models.loading import Pair
from .settings import Settings

STANDARD = "standard"
TRANSFORMERS = ("hf", "hf-assisted")
WARM_UP_TOKENS = 4
LOOK_S = 0.1
"""How often someone who waits for `generate`, which tells nothing while it runs, is told how far it is."""

ShouldStop: TypeAlias = Callable[[], bool]


@dataclass(frozen=True)
class _Run:
    path: str
    precision: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: Metrics


def compare(
    pair: Pair, prompt_ids: Sequence[int], settings: Settings, should_stop: ShouldStop
) -> Generator[Comparison, None, None]:
    """Progress while a method runs, its Row when it is done, and the Winner at the end if there is one.

    A method that fails is a row with its reason, and the others go on; after a stop, a row of what there is, and no
    more. Raises BadRequest before the first method for a prompt that does not fit."""
    names = [*methods.available(pair), *TRANSFORMERS]
    models: list[Any] = []  # transformers' copy of the weights: loaded when first needed, gone with this generator
    rows: list[Row] = []
    standard: _Run | None = None
    for index, name in enumerate(names):
        if should_stop():
            return
        yield Progress(name, index, len(names), 0.0)
        steps = (
            _by_transformers(name, pair, models, prompt_ids, settings, should_stop)
            if name in TRANSFORMERS
            else _by_engine(name, pair, prompt_ids, settings, should_stop)
        )
        try:
            run = None
            for step in steps:
                if isinstance(step, _Run):
                    run = step
                else:
                    yield Progress(name, index, len(names), min(1.0, step / settings.max_new_tokens))
        except Exception as error:
            if name == STANDARD and isinstance(error, SpecdemoError):
                raise  # a prompt or setting that no method can serve
            rows.append(Row(name, reason=failure_message(error)))
        else:
            assert run is not None
            standard = run if name == STANDARD else standard
            rows.append(_row(name, run, standard, settings))
        finally:
            steps.close()
        yield rows[-1]
        if rows[-1].finish_reason == "cancelled":
            return
    fastest = max(rows, key=lambda row: row.tokens_per_second or 0.0)
    if fastest.tokens_per_second:
        yield Winner(fastest.method, fastest.speedup, usages(fastest.method, pair, settings))


def _row(name: str, run: _Run, standard: _Run | None, settings: Settings) -> Row:
    metrics, equal = run.metrics, None
    if standard is not None and settings.greedy and "cancelled" not in (run.finish_reason, standard.finish_reason):
        equal = first_divergence(run.token_ids, standard.token_ids) is None
    return Row(
        method=name,
        path=run.path,
        precision=run.precision,
        tokens=len(run.token_ids),
        tokens_per_second=metrics.tokens_per_second,
        ttft_s=metrics.ttft_s,
        speedup=speedup(standard.metrics, metrics) if standard else None,
        acceptance_rate=metrics.acceptance_rate,
        mean_acceptance_length=metrics.mean_acceptance_length,
        finish_reason=run.finish_reason,
        equal=equal,
    )


def _by_engine(
    name: str, pair: Pair, prompt_ids: Sequence[int], settings: Settings, should_stop: ShouldStop
) -> Generator[int | _Run, None, None]:
    """One of our own methods: the tokens so far after every round, then the run."""
    folded, last = Fold(), None
    events: Iterator[Event] = methods.run(pair, name, prompt_ids, settings, explain=False, should_stop=should_stop)
    try:
        for event in events:
            folded.add(event)
            last = event
            yield folded.metrics().tokens
    finally:
        if isinstance(events, Generator):
            events.close()
    assert isinstance(last, Finished)
    target = pair.target
    yield _Run(target.forward_path, target.precision, last.token_ids, last.finish_reason, folded.metrics())


def _by_transformers(
    name: str,
    pair: Pair,
    models: list[Any],
    prompt_ids: Sequence[int],
    settings: Settings,
    should_stop: ShouldStop,
) -> Generator[int | _Run, None, None]:
    """transformers' `generate`, in a thread of its own, because it says nothing before it is done: the tokens so far a
    few times a second, then the run."""
    from .transformers_lanes import TransformersLane, TransformersModels

    given_up = threading.Event()
    commits = [0]

    def stop() -> bool:  # asked after every commit
        commits[0] += 1
        return given_up.is_set() or should_stop()

    def work() -> _Run:
        if not models:
            models.append(TransformersModels(pair))
        lane = TransformersLane(name, models[0])
        lane.run(prompt_ids, replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens)), stop)
        commits[0] = 0
        generation = lane.run(prompt_ids, settings, stop)
        return _Run(
            lane.forward_path, lane.precision, generation.token_ids, generation.finish_reason, generation.metrics
        )

    with ThreadPoolExecutor(max_workers=1) as thread:
        future = thread.submit(work)
        try:
            while not wait([future], timeout=LOOK_S).done:
                yield commits[0]
        finally:
            given_up.set()
    yield future.result()
