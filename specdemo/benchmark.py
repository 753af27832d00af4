"""How fast each method really is: the same prompts through every lane, in turns, and one JSON document about it.

Lanes are interleaved prompt by prompt in alternating order, after a warm-up, so that a machine that slows down slows
all of them. A speedup is the ratio of the standard lane's TPOT to the lane's own, on the same prompt of the same run;
over several prompts it is the median of these ratios, with their spread. Acceptance is pooled: counts of all tokens,
not a mean of means.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Protocol

from . import methods, transformers_lanes
from .environment import describe
from .errors import BadRequest
from .events import Drafted, Event, Finished, FinishReason, Started, Verified
from .metrics import Fold, Metrics, first_divergence, fold, speedup, speedup_of_totals, with_baseline
from .models.loading import Pair
from .settings import Settings
from .suite import SuitePrompt
from .terminal import FIGURES, cell, table
from .text import encode_prompt
from .transformers_lanes import TransformersLane, TransformersModels

STANDARD = "standard"
DRAFTLESS = (STANDARD, "hf")
ADAPTIVE = "adaptive"
WARM_UP_TOKENS = 16

Progress = Callable[[str, float], None]


class Run(Protocol):
    """One prompt through one lane."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def finish_reason(self) -> FinishReason: ...
    @property
    def metrics(self) -> Metrics: ...


class Lane(Protocol):
    """A method, ready to run, under the name `method`. `precision` and `forward_path` are the target's."""

    method: str
    precision: str
    forward_path: str
    draft: str | None
    draft_precision: str | None
    notes: tuple[str, ...]

    def run(self, prompt_ids: Sequence[int], settings: Settings, should_stop: Callable[[], bool]) -> Any: ...
    def pool(self, runs: Sequence[Any]) -> Metrics: ...


@dataclass(frozen=True)
class EngineRun:
    """The events of one run of our own engines."""

    events: tuple[Event, ...]

    @property
    def finished(self) -> Finished:
        event = self.events[-1]
        assert isinstance(event, Finished)
        return event

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.finished.token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.finished.finish_reason

    @cached_property
    def metrics(self) -> Metrics:
        return fold(self.events)


class EngineLane:
    """A method of `methods.METHODS`."""

    def __init__(self, pair: Pair, method: str) -> None:
        resolved, self.notes = methods.resolve(pair, method)
        draft = pair.draft if resolved.fallback else None
        self.method = method
        self.precision = pair.target.precision
        self.forward_path = pair.target.forward_path
        self.draft = draft.name if draft else None
        self.draft_precision = draft.precision if draft else None
        self._pair = pair

    def run(self, prompt_ids: Sequence[int], settings: Settings, should_stop: Callable[[], bool]) -> EngineRun:
        events = methods.run(self._pair, self.method, prompt_ids, settings, explain=False, should_stop=should_stop)
        return EngineRun(tuple(events))

    def pool(self, runs: Sequence[EngineRun]) -> Metrics:
        return pool(runs)


class VariantLane:
    """A lane with drafting settings of its own, by a name such as "speculative:3" or "hybrid:adaptive"."""

    def __init__(self, name: str, lane: Lane) -> None:
        self.method = name
        self.precision, self.forward_path = lane.precision, lane.forward_path
        self.draft, self.draft_precision, self.notes = lane.draft, lane.draft_precision, lane.notes
        self._lane = lane

    def run(self, prompt_ids: Sequence[int], settings: Settings, should_stop: Callable[[], bool]) -> Any:
        return self._lane.run(prompt_ids, variant_settings(self.method, settings), should_stop)

    def pool(self, runs: Sequence[Any]) -> Metrics:
        return self._lane.pool(runs)


def variant_settings(name: str, settings: Settings) -> Settings:
    """`settings` as the lane `name` runs with them: "method:K" drafts K tokens, "method:adaptive" as many of
    `settings.draft_length` as pay. Raises BadRequest."""
    method, _, variant = name.partition(":")
    if not variant:
        return settings
    if method in DRAFTLESS:
        raise BadRequest(f"{method} drafts nothing, so it has no draft length: leave out {':' + variant!r}.")
    if variant == ADAPTIVE:
        if method in transformers_lanes.METHODS:
            raise BadRequest(f"{method} drafts a fixed number of tokens here: give a number in place of {variant!r}.")
        return replace(settings, adaptive=True)
    if not variant.isdecimal():
        raise BadRequest(f"{variant!r} is no draft length: give a method as NAME, NAME:3 or NAME:{ADAPTIVE}.")
    return replace(settings, draft_length=int(variant), adaptive=False)


def with_draft_lengths(names: Iterable[str], draft_lengths: Sequence[int]) -> list[str]:
    """Each method that drafts, and has no draft length in its name, once for every one of several draft lengths."""
    if len(draft_lengths) < 2:
        return list(names)
    swept = (
        [name] if ":" in name or name in DRAFTLESS else [f"{name}:{draft_length}" for draft_length in draft_lengths]
        for name in names
    )
    return [name for group in swept for name in group]


def pool(runs: Sequence[EngineRun]) -> Metrics:
    """Metrics over all rounds of several runs, as if they were one lane's; those of single runs (TTFT, TPOT, tokens)
    mean nothing here. Rounds that a stop string took back are left out."""
    folded = Fold()
    for run in runs:
        room = len(run.token_ids) - 1
        for event in run.events:
            if isinstance(event, Started | Drafted):
                folded.add(event)
            elif isinstance(event, Verified):
                room -= event.num_accepted + (event.extra is not None)
                if room >= 0:
                    folded.add(event)
    return folded.metrics()


def make_lanes(
    pair: Pair, names: Sequence[str] | None, assistant: str | None = None, draft_lengths: Sequence[int] = ()
) -> list[Lane]:
    """Lanes by name, the standard one among them; without names every method that can run, and `hf`. A name can end in
    a draft length (see `variant_settings`); of several `draft_lengths` every other method that drafts runs with each.
    `assistant` is the draft model for `hf-assisted` (hub id or folder), where it is not the pair's own. Raises
    SpecdemoError."""
    check_methods(names or ())
    models = TransformersModels(pair, assistant)
    if not names:
        names = [*methods.available(pair), "hf", *(["hf-assisted"] if models.assistant_name else [])]
    names = with_draft_lengths([*([] if STANDARD in names else [STANDARD]), *names], draft_lengths)
    return [_make_lane(name, pair, models) for name in dict.fromkeys(names)]


def _make_lane(name: str, pair: Pair, models: TransformersModels) -> Lane:
    method, _, variant = name.partition(":")
    lane: Lane
    lane = TransformersLane(method, models) if method in transformers_lanes.METHODS else EngineLane(pair, method)
    return VariantLane(name, lane) if variant else lane


def check_methods(names: Sequence[str]) -> None:
    """Raises BadRequest for a name that is no method of the benchmark."""
    known = [*methods.METHODS, *transformers_lanes.METHODS]
    for name in names:
        if name.partition(":")[0] not in known:
            raise BadRequest(f"There is no method {name!r}: choose from {', '.join(known)}.")
        variant_settings(name, Settings())


@dataclass(frozen=True)
class Bench:
    """What is measured. `raw` as in `text.encode_prompt`."""

    pair: Pair
    lanes: Sequence[Lane]
    prompts: Sequence[SuitePrompt]
    settings: Settings
    repeats: int = 1
    raw: bool = False

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise BadRequest("The benchmark needs at least one repeat.")

    def measure(self, progress: Progress = lambda text, share: None) -> Results:
        """Run everything. Raises BadRequest before the first run for a prompt that cannot be served."""
        environment = describe(self.pair.target.device)  # before the work, which is itself a load
        ids = [self._encode(prompt) for prompt in self.prompts]
        runs: dict[str, list[list[Run]]] = {lane.method: [[] for _ in self.prompts] for lane in self.lanes}
        total = self.repeats * len(self.prompts) * len(self.lanes)
        progress("Warming up", 0.0)
        self._warm_up(ids[0])
        gc.collect()
        gc.freeze()  # else the collector walks the libraries' objects again and again inside timed runs
        try:
            for done, (repeat, index, lane) in enumerate(self._schedule()):
                prompt = self.prompts[index]
                progress(f"{prompt.id} {lane.method} (pass {repeat + 1} of {self.repeats})", done / total)
                runs[lane.method][index].append(lane.run(ids[index], self.settings, _never))
        finally:
            gc.unfreeze()
        progress("Measured", 1.0)
        return Results(self, environment, runs)

    def _schedule(self) -> Iterator[tuple[int, int, Lane]]:
        """Every lane on each prompt in turn, in one order and then in the opposite one."""
        for repeat in range(self.repeats):
            for index in range(len(self.prompts)):
                backwards = (repeat * len(self.prompts) + index) % 2 == 1
                for lane in reversed(self.lanes) if backwards else self.lanes:
                    yield repeat, index, lane

    def _warm_up(self, prompt_ids: Sequence[int]) -> None:
        """What happens once in a process (allocation, kernel choice, graph capture) must not be in a timed run."""
        settings = replace(
            self.settings, max_new_tokens=min(WARM_UP_TOKENS, self.settings.max_new_tokens), ignore_eos=True
        )
        for lane in self.lanes:
            lane.run(prompt_ids, settings, _never)

    def _encode(self, prompt: SuitePrompt) -> list[int]:
        try:
            ids = encode_prompt(self.pair.tokenizer, prompt.prompt, self.raw)
        except BadRequest as error:
            raise BadRequest(f"Prompt {prompt.id}: {error}") from None
        limit = self.pair.target.context_length
        if len(ids) >= limit:
            raise BadRequest(f"Prompt {prompt.id} has {len(ids)} tokens and the context holds {limit}: leave it out.")
        return ids


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Results:
    """What was measured: `runs[method][prompt index][repeat]`."""

    bench: Bench
    environment: Mapping[str, Any]
    runs: Mapping[str, Sequence[Sequence[Run]]]

    def document(self, **settings: Any) -> dict[str, Any]:
        """The JSON document. `settings` are recorded besides the decoding settings."""
        bench = self.bench
        target = bench.pair.target
        return {
            "environment": {
                **self.environment,
                "precision": target.precision,
                "forward_path": target.forward_path,
            },
            "settings": {
                "target": public_name(target.name),
                "draft": public_name(bench.pair.draft.name) if bench.pair.draft else None,
                **settings,
                "methods": [lane.method for lane in bench.lanes],
                "prompts": dict(Counter(prompt.category for prompt in bench.prompts)),
                "repeats": bench.repeats,
                "raw": bench.raw,
                **asdict(bench.settings),
            },
            "results": [self._row(lane) for lane in bench.lanes],
        }

    def _row(self, lane: Lane) -> dict[str, Any]:
        rows = self._prompt_rows(lane)
        pooled = self._pool(lane)
        categories = dict.fromkeys(prompt.category for prompt in self.bench.prompts)
        own_runs = [run for runs in self.runs[lane.method] for run in runs]
        baseline_s = dict(self._pool(self._standard).forward_s).get(1)
        equal = [row["texts_equal"] for row in rows]
        target = self.bench.pair.target.name
        settings = variant_settings(lane.method, self.bench.settings)
        drafts = pooled.drafted > 0
        return {
            "method": lane.method,
            "draft_length": settings.draft_length if drafts else None,
            "adaptive": settings.adaptive if drafts else None,
            "path": lane.forward_path,
            "precision": lane.precision,
            "draft": public_name(lane.draft) if lane.draft else None,
            "draft_precision": lane.draft_precision,
            "notes": [note.replace(target, public_name(target)) for note in (*self.bench.pair.notes, *lane.notes)],
            "prompts": len(rows),
            "tokens": sum(len(run.token_ids) for run in own_runs),
            "tokens_per_second": _median(row["tokens_per_second"] for row in rows),
            "tokens_per_second_spread": spread(row["tokens_per_second"] for row in rows),
            "ttft_ms": _median(row["ttft_ms"] for row in rows),
            "speedup": _median(row["speedup"] for row in rows),
            "speedup_spread": spread(row["speedup"] for row in rows),
            "speedup_by_category": {
                name: _median(row["speedup"] for row in rows if row["category"] == name) for name in categories
            },
            "speedup_of_totals": _median(row["speedup_of_totals"] for row in rows),
            **_acceptance(pooled),
            **_ahead(pooled),
            "cost_ratio": _rounded(pooled.cost_ratio),
            "verify_cost": _rounded(pooled.verify_cost),
            "verify_cost_by_width": {
                str(width): _rounded(seconds / baseline_s) for width, seconds in pooled.forward_s if baseline_s
            },
            "forward_ms_by_width": {str(width): _rounded(1000 * seconds) for width, seconds in pooled.forward_s},
            "texts_equal": sum(equal) / len(equal) if self.bench.settings.greedy else None,
            "rounds": pooled.rounds,
            "accepted_histogram": list(pooled.accepted_histogram),
            "seconds": self._seconds(own_runs),
            "by_category": {name: self._category(lane, name, rows) for name in categories},
            "by_prompt": rows,
        }

    @property
    def _standard(self) -> Lane:
        return next(lane for lane in self.bench.lanes if lane.method == STANDARD)

    def _pool(self, lane: Lane, category: str | None = None) -> Metrics:
        """Pooled metrics of a lane, its costs measured against the standard lane's forwards of one position."""
        pools = [
            each.pool(
                [
                    run
                    for prompt, runs in zip(self.bench.prompts, self.runs[each.method], strict=True)
                    for run in runs
                    if category in (None, prompt.category)
                ]
            )
            for each in (lane, self._standard)
        ]
        return with_baseline(*pools)

    def _category(self, lane: Lane, category: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        own = [row for row in rows if row["category"] == category]
        return {
            "prompts": len(own),
            "tokens_per_second": _median(row["tokens_per_second"] for row in own),
            "speedup": _median(row["speedup"] for row in own),
            "speedup_spread": spread(row["speedup"] for row in own),
            **_acceptance(self._pool(lane, category)),
        }

    def _prompt_rows(self, lane: Lane) -> list[dict[str, Any]]:
        """One row a prompt. Over repeats: the median of what was timed; tokens are those of the first pass."""
        rows = []
        for prompt, own, base in zip(self.bench.prompts, self.runs[lane.method], self.runs[STANDARD], strict=True):
            pairs = [(mine.metrics, standard.metrics) for mine, standard in zip(own, base, strict=True)]
            rows.append(
                {
                    "id": prompt.id,
                    "category": prompt.category,
                    "tokens": len(own[0].token_ids),
                    "finish_reason": own[0].finish_reason,
                    "tokens_per_second": _median(mine.tokens_per_second for mine, _ in pairs),
                    "ttft_ms": _median(1000 * mine.ttft_s if mine.ttft_s else None for mine, _ in pairs),
                    "speedup": _median(speedup(standard, mine) for mine, standard in pairs),
                    "speedup_of_totals": _median(speedup_of_totals(standard, mine) for mine, standard in pairs),
                    "mean_acceptance_length": _rounded(own[0].metrics.mean_acceptance_length),
                    "texts_equal": all(a.token_ids == b.token_ids for a, b in zip(own, base, strict=True)),
                    "first_divergence": first_divergence(own[0].token_ids, base[0].token_ids),
                }
            )
        return rows

    def _seconds(self, runs: Sequence[Run]) -> dict[str, float]:
        """Where the lane's time went, over all its runs."""
        metrics = [run.metrics for run in runs]
        parts = {"total": sum(m.total_s for m in metrics), "first_token": sum(m.ttft_s or 0.0 for m in metrics)}
        if any(m.forward_s for m in metrics):  # a lane that tells its phases apart
            parts["draft"] = sum(m.draft_s for m in metrics)
            parts["verify"] = sum(m.verify_s for m in metrics)
            parts["overhead"] = sum(m.overhead_s for m in metrics)
        return {name: round(seconds, 3) for name, seconds in parts.items()}


def tables(document: Mapping[str, Any]) -> str:
    """The document for people: a table of lanes, one of speedups by category, and the notes."""
    rows = document["results"]
    lanes = table(
        ["method", *(title for title, _, _ in COLUMNS), "equal", "path"],
        (
            [
                row["method"],
                *(cell(row[field], how) for _, field, how in COLUMNS),
                cell(row["texts_equal"], ".0%"),
                f"{row['path']}, {row['precision']}",
            ]
            for row in rows
        ),
    )
    categories = list(rows[0]["speedup_by_category"])
    speedups = table(
        ["speedup", "all", "quartiles", *categories],
        (
            [
                row["method"],
                cell(row["speedup"], ".2f"),
                _quartiles(row["speedup_spread"]),
                *(cell(row["speedup_by_category"][name], ".2f") for name in categories),
            ]
            for row in rows
        ),
    )
    notes = list(dict.fromkeys(note for row in rows for note in row["notes"]))
    return "\n\n".join([lanes, speedups, *(["\n".join(notes)] if notes else [])])


COLUMNS = (
    *FIGURES,
    ("hits", "hit_rate", ".0%"),
    ("draft cost", "cost_ratio", ".3f"),
    ("verify cost", "verify_cost", ".2f"),
)
"""Title, field of a result and format of the table's numbers."""


def public_name(name: str) -> str:
    """A model's name without the folders above it, where it is a folder."""
    folder = Path(name).expanduser()
    return folder.resolve().name if folder.is_dir() else name


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Least, quartiles and greatest of the values that are there."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    q1, _, q3 = quantiles(known, n=4, method="inclusive") if len(known) > 1 else known * 3
    return {"min": _rounded(min(known)), "q1": _rounded(q1), "q3": _rounded(q3), "max": _rounded(max(known))}


def _acceptance(metrics: Metrics) -> dict[str, Any]:
    return {
        "acceptance_rate": _rounded(metrics.acceptance_rate),
        "alpha": _rounded(metrics.alpha),
        "mean_acceptance_length": _rounded(metrics.mean_acceptance_length),
        "acceptance_by_position": _rounded(metrics.acceptance_by_position),
        "hit_rate": _rounded(metrics.hit_rate),
    }


def _ahead(metrics: Metrics) -> dict[str, Any]:
    """What came of drafts that were made ahead of time; nothing for a method that makes none."""
    if metrics.hit_rate is None:
        return {}
    return {
        "recall_by_fan_out": {str(fan_out): _rounded(share) for fan_out, share in metrics.recall_by_fan_out},
        "hit_rate_by_fan_out": {str(fan_out): _rounded(share) for fan_out, share in metrics.hit_rate_by_fan_out},
        "hidden_share": _rounded(metrics.hidden_share),
        "tokens_on_hit": _rounded(metrics.tokens_on_hit),
        "tokens_on_miss": _rounded(metrics.tokens_on_miss),
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(median(known)) if known else None


def _rounded(value: Any) -> Any:
    """Four decimals are more than any timing is worth."""
    if isinstance(value, tuple):
        return [_rounded(item) for item in value]
    return None if value is None else round(value, 4)


def _quartiles(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['q1']:.2f} to {spread['q3']:.2f}"
