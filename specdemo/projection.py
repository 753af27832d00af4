"""What SSD would do with a device for each model: the rounds of a real run, at other latencies.

Which tokens stood and which outcomes were guessed does not depend on how long anything took. So a recorded run is
played again with latencies of choice: those measured in the recording, the draft model now on a device of its own like
the target's, or those of a profile. Standard and speculative decoding are projected in the same way first and compared
with how long they really took; where that is off by more than a tenth, the projection of SSD is not shown.

A projection is a calculation and labelled so wherever it is shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from .errors import BadRequest
from .events import Drafted, Event, Finished, Prefilled, Started, Verified
from .metrics import Metrics, fold

LANES = ("standard", "speculative", "ssd")
GREATEST_ERROR = 0.10
MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Seconds: verify_s of a pass of the target by its positions, draft_s of a token by the draft model, build_s of a
    round's speculation cache, round_s of all else in a round. devices: the target's; SSD takes one more. source: where
    the numbers come from, half a sentence."""

    verify_s: Mapping[int, float]
    draft_s: float
    build_s: float
    round_s: float
    devices: int
    source: str

    def verify(self, width: int) -> float:
        """A pass over `width` positions; between and beyond known widths that of the nearest."""
        return self.verify_s[min(self.verify_s, key=lambda known: (abs(known - width), known))]


_H100_BYTES_S = 3.35e12
_LLAMA_70B_BYTES, _LLAMA_1B_BYTES = 141e9, 2.5e9

PROFILES: Mapping[str, Latencies] = {
    "h100-llama-70b": Latencies(
        verify_s={1: _LLAMA_70B_BYTES / (4 * _H100_BYTES_S)},
        draft_s=_LLAMA_1B_BYTES / _H100_BYTES_S,
        build_s=6 * _LLAMA_1B_BYTES / _H100_BYTES_S,
        round_s=0.0,
        devices=4,
        source="of Llama 3.1 70B on four H100 and Llama 3.2 1B on a fifth, in bfloat16, each pass taken as long as "
        "reading the weights at the 3.35 TB/s of NVIDIA's data sheet (H100 SXM), with acceptance and hits of this run",
    ),
}


@dataclass(frozen=True, slots=True)
class Projected:
    """Seconds a token of one lane by the projection; and as measured, None where it ran on other devices."""

    method: str
    tpot_s: float
    measured_s: float | None
    devices: int

    @property
    def error(self) -> float | None:
        return None if self.measured_s is None else abs(self.tpot_s / self.measured_s - 1.0)


@dataclass(frozen=True, slots=True)
class Projection:
    """`validation`: standard and speculative with the measured latencies. `lanes`: all three with those of `latencies`;
    empty where the validation is off by more than GREATEST_ERROR."""

    latencies: Latencies
    validation: tuple[Projected, ...]
    lanes: tuple[Projected, ...]

    @property
    def error(self) -> float:
        return max(lane.error or 0.0 for lane in self.validation)


def project(events: Iterable[Event], profile: str = MEASURED) -> Projection:
    """Project a recording that holds a standard, a speculative and an SSD lane of one prompt, the last two with the
    same draft length. Raises BadRequest."""
    if profile != MEASURED and profile not in PROFILES:
        raise BadRequest(f"There is no profile {profile!r}: choose one of {', '.join([MEASURED, *PROFILES])}.")
    lanes = _lanes(events)
    metrics = {method: fold(own) for method, own in lanes.items()}
    measured = _measured(lanes, metrics)
    validation = tuple(
        Projected(method, _tpot(lanes[method], measured[method]), metrics[method].tpot_s, 1)
        for method in ("standard", "speculative")
    )
    latencies = measured["ssd"] if profile == MEASURED else PROFILES[profile]
    projection = Projection(latencies, validation, ())
    if projection.error > GREATEST_ERROR:
        return projection
    own = measured if profile == MEASURED else dict.fromkeys(LANES, latencies)
    projected = (
        Projected(method, _tpot(lanes[method], own[method]), None, latencies.devices + (method == "ssd"))
        for method in LANES
    )
    return Projection(latencies, validation, tuple(projected))


def _lanes(events: Iterable[Event]) -> dict[str, list[Event]]:
    """The events of each lane by its method."""
    by_lane: dict[str, list[Event]] = {}
    for event in events:
        by_lane.setdefault(event.lane, []).append(event)
    started = {name: own[0] for name, own in by_lane.items() if isinstance(own[0], Started)}
    lanes = {event.method: by_lane[name] for name, event in started.items() if isinstance(by_lane[name][-1], Finished)}
    if missing := [method for method in LANES if method not in lanes]:
        raise BadRequest(
            f"A projection needs finished lanes of standard, speculative and ssd, and {missing[0]} is missing: record "
            "the same prompt with each method and put the files one after the other into one."
        )
    prompts = {started[name].prompt_ids for name in started if started[name].method in LANES}
    lengths = {
        event.settings.get("draft_length") for event in started.values() if event.method in ("speculative", "ssd")
    }
    if len(prompts) > 1 or len(lengths) > 1:
        raise BadRequest("The lanes answer different prompts or draft differently: record them with the same options.")
    return lanes


def _measured(lanes: Mapping[str, Sequence[Event]], metrics: Mapping[str, Metrics]) -> dict[str, Latencies]:
    """The latencies for each lane. SSD's passes are those of lanes in which the target had its device for itself, as it
    has with a device for each model."""
    speculative = metrics["speculative"]
    verify_s = {**dict(metrics["standard"].forward_s), **dict(speculative.forward_s)}
    ahead = [event.speculation for event in lanes["ssd"] if isinstance(event, Verified) and event.speculation]
    if not (ahead and verify_s and speculative.draft_forward_s) or any(
        metrics[method].tpot_s is None for method in LANES
    ):
        raise BadRequest("The recording is too short to tell how long drafts take: ask for more tokens.")
    build_s = median(round.build_s for round in ahead)
    source = "measured in this recording, the draft model on a second device like the target's"

    def latencies(rest: Metrics) -> Latencies:
        round_s = rest.overhead_s / rest.rounds
        return Latencies(verify_s, speculative.draft_forward_s or 0.0, build_s, round_s, 1, source)

    drafting = latencies(speculative)
    return {"standard": latencies(metrics["standard"]), "speculative": drafting, "ssd": drafting}


def _tpot(events: Sequence[Event], latencies: Latencies) -> float:
    """Seconds a token of a lane's rounds at other latencies."""
    total, tokens, width, drafting = 0.0, 0, 1, 0.0
    for event in events:
        if isinstance(event, Drafted):
            width, drafting = len(event.tokens) + 1, event.draft_forwards * latencies.draft_s
        elif isinstance(event, Verified):
            verify = latencies.verify(width)
            wait = max(0.0, latencies.build_s - verify) if event.hit else 0.0
            total += drafting + verify + wait + latencies.round_s
        elif isinstance(event, Finished):
            tokens = len(event.token_ids) - any(isinstance(earlier, Prefilled) for earlier in events)
    return total / tokens


def table_of(projection: Projection) -> list[str]:
    """Lines for people."""
    lines = [
        f"{lane.method}: projected {1 / lane.tpot_s:.1f} tokens/s, measured {1 / (lane.measured_s or 1.0):.1f} "
        f"({100 * (lane.error or 0.0):.1f} % off)"
        for lane in projection.validation
    ]
    if not projection.lanes:
        return [
            *lines,
            f"The projection is off by {100 * projection.error:.0f} % where it can be checked, more than "
            f"{100 * GREATEST_ERROR:.0f} %, so nothing is projected for SSD.",
        ]
    standard = projection.lanes[0].tpot_s
    lines.append(f"Projected, not measured; latencies {projection.latencies.source}:")
    for lane in projection.lanes:
        devices = f"{lane.devices} devices" if lane.devices > 1 else "1 device"
        lines.append(
            f"{lane.method}, {devices}: {1 / lane.tpot_s:.1f} tokens/s, {standard / lane.tpot_s:.2f} x standard"
        )
    return lines
