"""Engine time, by a clock that only the tests move."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from specdemo import clock as clock_module
from specdemo.clock import Clock
from specdemo.events import Event, Failed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Time:
    """Stands still unless moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time()
    monkeypatch.setattr(clock_module, "time", time)
    return time


def test_it_starts_stopped_and_runs_from_start_to_stop(time: Time) -> None:
    clock = Clock(CPU)
    time.now += 5
    assert clock.now == 0.0
    clock.start()
    time.now += 2
    assert clock.now == 2.0
    clock.start()  # already running
    time.now += 1
    clock.stop()
    time.now += 7
    assert clock.now == 3.0
    clock.stop()
    assert clock.now == 3.0
    clock.start()
    time.now += 1
    assert clock.now == 4.0


def test_pitfall_18_it_stands_still_while_events_are_with_the_consumer(time: Time) -> None:
    clock = Clock(CPU)
    events = [Failed("lane", 0.0, str(i)) for i in range(3)]

    def engine() -> Iterator[Event]:
        clock.start()
        time.now += 1
        yield from clock.suspended(*events)
        time.now += 2

    told = []
    for event in engine():
        time.now += 1000
        told.append(event)
        assert clock.now == 1.0
    assert told == events
    assert clock.now == 3.0


def test_pausing_leaves_the_phases_alone_and_always_goes_on(time: Time) -> None:
    clock = Clock(CPU)
    clock.start()
    with clock.phase("draft"):
        time.now += 1
    with clock.paused():
        time.now += 50
    assert clock.now == 1.0
    failing = clock.paused()
    failing.__enter__()
    time.now += 50
    assert not failing.__exit__(RuntimeError, RuntimeError("inside"), None)
    time.now += 1
    assert clock.now == 2.0
    assert clock.read() == {"draft": 1.0}


def test_phases_add_up_until_they_are_read(time: Time) -> None:
    clock = Clock(CPU)
    clock.start()
    for seconds in (1, 2):
        with clock.phase("draft"):
            time.now += seconds
    with clock.phase("verify"):
        time.now += 4
    time.now += 8
    assert clock.read() == {"draft": 3.0, "verify": 4.0}
    assert clock.read() == {}
    with clock.phase("draft"):
        time.now += 1
    assert clock.read() == {"draft": 1.0}
    assert clock.now == 16.0


class Gpu:
    """What a CUDA stream is to the clock: work is queued at once and done later; events are stamped when reached."""

    def __init__(self) -> None:
        self.queued = 0.0  # device seconds of the work given so far
        self.log: list[str] = []
        gpu = self

        class FakeEvent:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing
                self.at: float | None = None
                self.reached = False

            def record(self, stream: str) -> None:
                assert stream == "the current stream"
                self.at = gpu.queued
                gpu.log.append("record")

            def synchronize(self) -> None:
                self.reached = True
                gpu.log.append("wait")

            def elapsed_time(self, end: Any) -> float:
                assert end.reached, "read before it happened"
                assert self.at is not None
                return float(end.at - self.at) * 1000.0

        self.event = FakeEvent


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the current stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: gpu.log.append("synchronize"))
    return gpu


def test_pitfall_17_on_cuda_a_phase_is_the_devices_time_and_not_the_launch(time: Time, gpu: Gpu) -> None:
    clock = Clock(CUDA)
    clock.start()
    for seconds in (0.5, 0.25):
        with clock.phase("verify"):
            gpu.queued += seconds  # the host goes on at once
    with clock.phase("judge"):
        gpu.queued += 0.125
    assert gpu.log == ["record"] * 6  # timing adds no synchronisation
    assert clock.read() == {"verify": 0.75, "judge": 0.125}
    assert gpu.log == ["record"] * 6 + ["wait"] * 3
    assert clock.read() == {}


def test_pitfall_17_on_cuda_a_pause_waits_for_the_work_before_it_and_its_own(time: Time, gpu: Gpu) -> None:
    clock = Clock(CUDA)
    clock.start()
    with clock.paused():
        assert gpu.log == ["synchronize"]
    assert gpu.log == ["synchronize"] * 2
