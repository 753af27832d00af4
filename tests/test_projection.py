"""A projection adds up the rounds of a real run at other latencies, and is held back where it cannot be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import TableLM, decode, letters, make_job, random_table

from specdemo import cli
from specdemo.errors import BadRequest
from specdemo.events import Drafted, Event, Finished, Prefilled, Verified
from specdemo.metrics import fold
from specdemo.projection import LANES, project, table_of
from specdemo.settings import Settings
from specdemo.trace import write

V = 8
TARGET = TableLM(random_table(0, V), context=999)
DRAFT = TableLM(random_table(0, V) + random_table(5, V, scale=0.8), context=999)
VERIFY_S, DRAFT_S, BUILD_S, REST_S = 0.030, 0.004, 0.020, 0.001


def lanes(settings: Settings, stretched: float = 1.0, build_s: float = BUILD_S) -> dict[str, list[Event]]:
    """A lane of each method with phases of known length. `stretched`: how much longer each second speculative round
    really takes than its parts."""
    told = {}
    for method in LANES:
        job = make_job(TARGET, [0, 1, 2], settings, letters(V), lane=method, method=method)
        told[method] = timed(decode(job, method, DRAFT), stretched if method == "speculative" else 1.0, build_s)
    return told


def timed(events: Sequence[Event], stretched: float, build_s: float) -> list[Event]:
    t, told = 0.0, []
    for index, event in enumerate(events):
        match event:
            case Prefilled():
                t += 0.1
                event = replace(event, t=t, target_s=0.09, draft_s=0.01)
            case Drafted():
                t += DRAFT_S * event.draft_forwards
                event = replace(event, t=t, draft_s=DRAFT_S * event.draft_forwards)
            case Verified():
                verify_s = VERIFY_S * (stretched if index % 4 == 3 else 1.0)
                t += verify_s + REST_S
                ahead = event.speculation and replace(event.speculation, build_s=build_s)
                event = replace(event, t=t, verify_s=verify_s, judge_s=REST_S, speculation=ahead)
            case _:
                event = replace(event, t=t)
        told.append(event)
    return told


def joined(told: dict[str, list[Event]]) -> list[Event]:
    return [event for own in told.values() for event in own]


SETTINGS = Settings(max_new_tokens=60, draft_length=3, fan_out_budget=4, temperature=1.0)


def test_what_was_measured_is_projected_exactly_and_ssd_pays_for_misses_only() -> None:
    told = lanes(SETTINGS)
    projection = project(joined(told))
    assert projection.error < 1e-9
    standard, speculative, ssd = projection.lanes
    assert standard.tpot_s == pytest.approx(VERIFY_S + REST_S)
    rounds = [event for event in told["ssd"] if isinstance(event, Drafted)]
    misses = sum(event.draft_forwards for event in rounds)
    assert 0 < misses < sum(len(event.tokens) for event in rounds)
    wanted = (len(rounds) * (VERIFY_S + REST_S) + misses * DRAFT_S) / 59
    assert ssd.tpot_s == pytest.approx(wanted)
    assert speculative.tpot_s == pytest.approx(fold(told["speculative"]).tpot_s)
    assert ssd.tpot_s < speculative.tpot_s
    assert (standard.devices, speculative.devices, ssd.devices) == (1, 1, 2)
    assert all(lane.measured_s is None for lane in projection.lanes)


def test_a_cache_that_takes_longer_than_the_verification_is_waited_for_on_hits() -> None:
    quick, slow = (project(joined(lanes(SETTINGS, build_s=seconds))).lanes[2].tpot_s for seconds in (0.03, 0.05))
    told = lanes(SETTINGS)["ssd"]
    hits = sum(event.hit is True for event in told if isinstance(event, Verified))
    assert slow - quick == pytest.approx(hits * 0.02 / 59)


def test_a_projection_that_is_off_where_it_can_be_checked_is_not_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = joined(lanes(SETTINGS, stretched=2.0))
    projection = project(events)
    assert projection.error > 0.1
    assert projection.lanes == ()
    path = tmp_path / "run.jsonl"
    write(path, events)
    assert cli.main(["project", str(path)]) == cli.FAILED
    out = capsys.readouterr().out
    assert "nothing is projected for SSD" in out
    assert "2 devices" not in out


def test_the_command_says_what_is_projected_and_on_how_many_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.jsonl"
    write(path, joined(lanes(SETTINGS)))
    assert cli.main(["project", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Projected, not measured" in out
    assert "ssd, 2 devices:" in out
    assert cli.main(["project", str(path), "--profile", "h100-llama-70b"]) == 0
    out = capsys.readouterr().out
    assert "ssd, 5 devices:" in out
    assert "data sheet" in out
    assert cli.main(["project", str(path), "--profile", "abacus"]) == cli.BAD_ARGUMENTS
    assert "There is no profile 'abacus'" in capsys.readouterr().err


def test_lanes_that_are_missing_or_do_not_belong_together_are_refused() -> None:
    told = lanes(SETTINGS)
    with pytest.raises(BadRequest, match="ssd is missing"):
        project([*told["standard"], *told["speculative"]])
    cut = [event for event in told["ssd"] if not isinstance(event, Finished)]
    with pytest.raises(BadRequest, match="ssd is missing"):
        project([*told["standard"], *told["speculative"], *cut])
    other = lanes(replace(SETTINGS, draft_length=2))
    with pytest.raises(BadRequest, match="draft differently"):
        project([*told["standard"], *told["speculative"], *other["ssd"]])
    short = lanes(replace(SETTINGS, max_new_tokens=1))
    with pytest.raises(BadRequest, match="too short"):
        project(joined(short))


def test_a_table_tells_the_error_of_each_lane_that_can_be_checked() -> None:
    lines = table_of(project(joined(lanes(SETTINGS))))
    assert lines[0].startswith("standard: projected 32.3 tokens/s, measured 32.3 (0.0 % off)")
