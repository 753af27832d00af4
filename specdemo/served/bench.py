"""How fast each server is: the same prompts through every lane in turn, measured at the client.

The names and formulas are those of `specdemo.benchmark`; here no two lanes run at once, so that servers which share a
machine do not slow each other. What the network adds is told apart, and is in every time.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from statistics import median
from typing import Any

from .. import __version__
from ..errors import SpecdemoError
from ..events import UNTOLD, Event, Failed, Finished, settled
from ..metrics import Metrics, first_divergence, fold, speedup
from ..request import RaceRequest
from ..settings import Settings
from ..suite import SuitePrompt
from ..terminal import FIGURES, cell, table
from .arena import ServedArena

WARM_UP_TOKENS = 16

Progress = Callable[[str, float], None]


def measure(
    arena: ServedArena,
    prompts: Sequence[SuitePrompt],
    settings: Settings,
    repeats: int = 1,
    raw: bool = False,
    progress: Progress = lambda text, share: None,
) -> dict[str, Any]:
    """The JSON document. A prompt that fails in a lane is left out of that lane's numbers, with its reason; raises
    SpecdemoError where nothing else is left."""
    runs: dict[str, list[list[Run]]] = {lane: [[] for _ in prompts] for lane in arena.lanes}
    failures: list[dict[str, str]] = []
    progress("Warming up", 0.0)
    for lane in arena.lanes:
        short = replace(settings, max_new_tokens=min(WARM_UP_TOKENS, settings.max_new_tokens))
        _run(arena, lane, prompts[0].prompt, short, raw)
    schedule = list(_schedule(arena.lanes, len(prompts), repeats))
    for done, (repeat, index, lane) in enumerate(schedule):
        prompt = prompts[index]
        progress(f"{prompt.id} {lane} (pass {repeat + 1} of {repeats})", done / len(schedule))
        run = _run(arena, lane, prompt.prompt, settings, raw)
        if isinstance(run, str):
            failures.append({"prompt": prompt.id, "lane": lane, "reason": run})
        else:
            runs[lane][index].append(run)
    progress("Measured", 1.0)
    for lane in arena.lanes:
        if not any(runs[lane]):
            raise SpecdemoError(next(failure["reason"] for failure in failures if failure["lane"] == lane))
    return {
        "environment": {
            "specdemo": __version__,
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "measured": "at the client",
            "servers": {lane: arena.described(lane) for lane in arena.lanes},
        },
        "settings": {"prompts": [prompt.id for prompt in prompts], "repeats": repeats, "raw": raw, **asdict(settings)},
        "results": [_row(lane, runs, settings) for lane in arena.lanes],
        "failures": failures,
    }


class Run:
    """One prompt through one lane that came to its end."""

    def __init__(self, events: Sequence[Event], finished: Finished) -> None:
        self.finished = finished
        self.metrics: Metrics = fold(events)

    def equals(self, other: Run) -> bool:
        """Token for token where both lanes tell ids, else by the text."""
        a, b = self.finished, other.finished
        if UNTOLD in (*a.token_ids, *b.token_ids):
            return a.text == b.text
        return first_divergence(a.token_ids, b.token_ids) is None


def _run(arena: ServedArena, lane: str, prompt: str, settings: Settings, raw: bool) -> Run | str:
    """The run, or why there is none."""
    events = settled(arena.decode(lane, RaceRequest(prompt, settings, raw=raw)))
    last = events[-1]
    if isinstance(last, Failed):
        return last.message
    assert isinstance(last, Finished)
    return Run(events, last)


def _schedule(lanes: Sequence[str], prompts: int, repeats: int) -> Iterator[tuple[int, int, str]]:
    """Every lane on each prompt in turn, in one order and then in the opposite one."""
    for repeat in range(repeats):
        for index in range(prompts):
            backwards = (repeat * prompts + index) % 2 == 1
            for lane in reversed(lanes) if backwards else lanes:
                yield repeat, index, lane


def _row(lane: str, runs: Mapping[str, Sequence[Sequence[Run]]], settings: Settings) -> dict[str, Any]:
    own = [run for repeats in runs[lane] for run in repeats]
    metrics = [run.metrics for run in own]
    pairs = [
        pair for a, b in zip(runs.get("standard", []), runs[lane], strict=False) for pair in zip(a, b, strict=False)
    ]
    drafted, accepted = sum(m.drafted for m in metrics), sum(m.accepted for m in metrics)
    rounds = sum(m.rounds for m in metrics)
    decoded = sum(m.tokens - 1 for m in metrics if m.rounds)
    judged_alpha = [m.alpha for m in metrics if m.alpha is not None]
    return {
        "lane": lane,
        "prompts": sum(bool(repeats) for repeats in runs[lane]),
        "tokens": sum(m.tokens for m in metrics),
        "tokens_per_second": _median(m.tokens_per_second for m in metrics),
        "ttft_ms": _median(1000 * m.ttft_s if m.ttft_s else None for m in metrics),
        "tpot_ms": _median(1000 * m.tpot_s if m.tpot_s else None for m in metrics),
        "speedup": _median(speedup(a.metrics, b.metrics) for a, b in pairs),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
        "alpha": _median(judged_alpha),
        "mean_acceptance_length": round(decoded / rounds, 4) if rounds else None,
        "texts_equal": sum(a.equals(b) for a, b in pairs) / len(pairs) if pairs and settings.greedy else None,
        "notes": list(dict.fromkeys(note for run in own for note in run.finished.notes)),
    }


def tables(document: Mapping[str, Any]) -> str:
    """The document for people."""
    servers = document["environment"]["servers"]
    rows = [
        [row["lane"], servers[row["lane"]]["engine"], *(cell(row[field], how) for _, field, how in COLUMNS)]
        for row in document["results"]
    ]
    lines = [table(["lane", "server", *(title for title, _, _ in COLUMNS)], rows), "", "Measured at the client."]
    for lane, server in servers.items():
        lines.append(f"{lane}: {server['model']}, {1000 * server['round_trip_s']:.1f} ms for a request without work.")
    lines += [note for row in document["results"] for note in row["notes"]]
    lines += [f"{failure['prompt']}, {failure['lane']}: {failure['reason']}" for failure in document["failures"]]
    return "\n".join(dict.fromkeys(lines))


COLUMNS = (
    *FIGURES,
    ("equal", "texts_equal", ".0%"),
)
"""Title, field of a result and format of the table's numbers."""


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None
