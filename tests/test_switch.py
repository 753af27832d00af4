"""One pair in the place of another: the old one goes before the new one comes, and a failure leaves the old one."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_arena import request, tiny_pair
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.arena import Arena
from specdemo.errors import ModelUnavailable
from specdemo.events import Event, Failed, Finished
from specdemo.failures import failure_message
from specdemo.models.loading import Pair
from specdemo.models.memory import ran_out_of_memory
from specdemo.plan.choose import Wishes, choose, smaller
from specdemo.plan.devices import machine_of
from specdemo.plan.load import Planned
from specdemo.plan.pairs import shapes_of

Progress = Callable[[str, float], None]


@pytest.fixture
def arena() -> Arena:
    made = Arena(lambda progress: tiny_pair())
    made.load()
    return made


def another(progress: Progress) -> Pair:
    progress("Loading another", 0.5)
    pair = tiny_pair()
    pair.target.name = "another"
    return pair


def finish_reasons(events: list[Event]) -> list[str]:
    return [event.finish_reason for event in events if isinstance(event, Finished)]


def test_the_old_pair_is_gone_before_the_new_one_is_loaded(arena: Arena) -> None:
    assert arena.pair is not None
    old = weakref.ref(arena.pair.target)
    alive = []

    def load(progress: Progress) -> Pair:
        gc.collect()
        alive.append(old())
        return another(progress)

    arena.switch(load)
    assert alive == [None]
    assert arena.status.state == "ready"
    assert arena.pair is not None
    assert arena.pair.target.name == "another"
    assert finish_reasons(list(arena.race(request(8)))) == ["length", "length"]


def test_a_switch_stops_the_race_in_progress_and_races_asked_for_meanwhile_get_the_new_pair(arena: Arena) -> None:
    race = arena.race(request(2000))
    events = [next(race) for _ in range(10)]
    entered, go = threading.Event(), threading.Event()

    def load(progress: Progress) -> Pair:
        entered.set()
        go.wait(10)
        return another(progress)

    thread = arena.start_switching(load)
    events += list(race)
    assert finish_reasons(events) == ["cancelled", "cancelled"]
    assert entered.wait(10)
    assert arena.status.state == "loading"
    threading.Timer(0.1, go.set).start()
    assert finish_reasons(list(arena.race(request(8)))) == ["length", "length"]
    thread.join(10)
    assert arena.pair is not None
    assert arena.pair.target.name == "another"


def test_a_pair_that_cannot_be_had_leaves_the_old_one(arena: Arena) -> None:
    def fail(progress: Progress) -> Pair:
        raise ModelUnavailable("owner/model is gated: accept its licence.")

    arena.switch(fail)
    assert arena.status.state == "ready"
    assert arena.status.message == "owner/model is gated: accept its licence. The pair before is back: target is ready."
    assert finish_reasons(list(arena.race(request(8)))) == ["length", "length"]


def test_loading_can_be_cancelled_and_the_old_pair_comes_back(arena: Arena) -> None:
    reached = threading.Event()

    def slow(progress: Progress) -> Pair:
        for step in range(1000):
            progress("Loading slowly", step / 1000)
            reached.set()
            threading.Event().wait(0.01)
        pytest.fail("loaded to the end")

    thread = arena.start_switching(slow)
    assert reached.wait(10)
    assert arena.status.message == "Loading slowly"
    arena.cancel_loading()
    thread.join(10)
    assert arena.status.state == "ready"
    assert arena.status.message.startswith("Loading was cancelled. The pair before is back: target is ready.")
    arena.cancel_loading()  # there is nothing to cancel any more
    arena.switch(another)
    assert arena.status.message == "another is ready"


def test_without_an_old_pair_a_failure_stays_a_failure() -> None:
    def fail(progress: Progress) -> Pair:
        raise ModelUnavailable("There is no such model.")

    arena = Arena(fail)
    arena.load()
    arena.switch(fail)
    assert arena.status.state == "failed"
    arena.switch(another)
    assert arena.status.state == "ready"


SWITCH = """
import ctypes, gc, json, sys
from pathlib import Path
import torch
from specdemo.arena import Arena
from specdemo.plan.load import load_fitting

torch.set_num_threads(1)

def used():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["RssFile"].split()[0]))

folders = sys.argv[1:]
load = lambda folder, dtype: lambda progress: load_fitting(folder, folder, device="cpu", dtype=dtype, progress=progress)
arena = Arena(load(folders[0], "float32"))
arena.load()
found = []
for index in range(10):
    arena.switch(load(folders[(index + 1) % 2], ("float32", "float16")[index % 2]))
    assert arena.status.state == "ready", arena.status
    if index % 2:
        found.append(used())
print(json.dumps(found))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.process
def test_ten_switches_leave_the_memory_as_it_was(tmp_path: Path, tiny_target: LlamaForCausalLM) -> None:
    from tiny_folders import save_folder

    model_bytes = 0
    for name in ("a", "b"):
        folder = save_folder(tiny_target, tmp_path / name)
        config = LlamaConfig.from_pretrained(folder)
        config.hidden_size, config.intermediate_size, config.num_hidden_layers = 512, 1024, 4
        model = LlamaForCausalLM(config)
        model.save_pretrained(folder)
        model_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    done = subprocess.run(
        [sys.executable, "-c", SWITCH, str(tmp_path / "a"), str(tmp_path / "b")],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert model_bytes > 15e6
    assert max(found[1:]) - found[0] < model_bytes / 2  # the least that a leak would add in eight switches is 16 models


# -- memory that runs out ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"),
    ],
)
def test_every_allocator_is_understood(error: Exception) -> None:
    assert ran_out_of_memory(error)
    assert "memory ran out" in failure_message(error)


def test_other_errors_are_not_taken_for_it() -> None:
    assert not ran_out_of_memory(RuntimeError("the model broke"))
    assert not ran_out_of_memory(ValueError("out of memory"))


def test_a_real_allocation_that_fails_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)


def test_running_out_of_memory_ends_the_lane_offers_a_smaller_plan_and_the_process_lives() -> None:
    shapes, machine = shapes_of("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"), machine_of("24GiB")
    plan = choose(*shapes, machine, Wishes())
    less = smaller(plan, *shapes, machine, Wishes())
    assert less is not None
    names = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")
    pair = replace(tiny_pair(), plan=plan, smaller=Planned(*names, machine, Wishes(), less))
    arena = Arena(lambda progress: pair)
    arena.load()
    draft = pair.draft
    assert draft is not None
    real = draft.open
    draft.open = _fails  # type: ignore[method-assign]
    events = list(arena.race(request(8)))
    failed = next(event for event in events if isinstance(event, Failed))
    assert failed.lane == "speculative"
    assert "memory ran out" in failed.message
    assert "or load the target in 8 bit and the draft model in bfloat16, which takes" in failed.message
    assert less.quantize == "int8"
    assert finish_reasons(events) == ["length"]  # the other lane's
    draft.open = real  # type: ignore[method-assign]
    assert finish_reasons(list(arena.race(request(8)))) == ["length", "length"]


def _fails(_capacity: int) -> None:
    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
