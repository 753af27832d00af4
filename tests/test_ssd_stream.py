"""SSD on one card: nothing waits for the host while drafts are queued, and what is called hidden was really saved.

There is no card here. Streams are timelines that a test moves on by hand, which shows what is made of the times; that a
card keeps them so is not shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import TableLM, random_table
from torch.overrides import TorchFunctionMode
from transformers import LlamaForCausalLM

from specdemo.models.lean import LeanLM
from specdemo.settings import Settings
from specdemo.ssd.board import Board
from specdemo.ssd.helper import Settled
from specdemo.ssd.speculator import Speculator
from specdemo.ssd.stream import ALONE_ROUNDS, StreamHelper, hidden
from specdemo.ssd.worker import Worker

READS = {"tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"}
"""Calls that fetch a result from the device."""


class Waits(TorchFunctionMode):
    """Writes down every call that a card would have to finish its work for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in READS or (func is torch.tensor and kwargs.get("device") is not None):
            self.seen.append(name)
        return func(*args, **kwargs)


GREEDY, SAMPLED = Settings(draft_length=3, fan_out_budget=6), Settings(draft_length=3, fan_out_budget=6, temperature=1)


@pytest.mark.parametrize(
    "settings",
    [
        GREEDY,
        replace(GREEDY, fan_out="geometric"),
        replace(GREEDY, adaptive=True),
        SAMPLED,
        replace(SAMPLED, top_k=5, top_p=0.9, saguaro=0.5),
    ],
    ids=["greedy", "geometric", "adaptive", "sampled", "sampled from fewer"],
)
def test_once_the_draft_is_read_nothing_waits_for_the_device(
    tiny_target: LlamaForCausalLM, tiny_draft: LlamaForCausalLM, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = LeanLM.from_transformers(tiny_draft, "draft"), LeanLM.from_transformers(tiny_target, "target")
    board = Board(settings, draft, target, shared=False)
    worker = Worker(Speculator(draft, target, settings, 40), board, settings.draft_length)
    worker.prefill([1, 5, 9, 5])
    waits, forward = Waits(), LeanLM.forward

    def read(*args: Any) -> Any:
        waits.seen.clear()  # what is told to the card before its first work
        return forward(*args)

    monkeypatch.setattr(LeanLM, "forward", read)
    with waits:
        for _step in worker.speculate([1, 5, 9, 5, 2], [3, 4, 6]):
            pass
    assert waits.seen == []
    assert sum(board.fan_out()) == settings.fan_out_budget
    worker.close()


def test_a_call_that_waits_would_be_noticed() -> None:
    with (waits := Waits()):
        torch.tensor([1.0], device="cpu").tolist()
    assert waits.seen == ["tensor", "tolist"]


class Stream:
    """A timeline, in seconds."""

    def __init__(self) -> None:
        self.at = 0.0

    def wait_stream(self, other: Stream) -> None:
        self.at = max(self.at, other.at)


class Mark:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        self.at = stream.at

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Mark) -> float:
        return 1000.0 * (later.at - self.at)


Round = Callable[[float, float], Settled]


@pytest.fixture
def run_round(monkeypatch: pytest.MonkeyPatch) -> Iterator[Round]:
    """A round on a card whose verification and tree take so many seconds."""
    main, now = Stream(), {"step": 0.0}
    current = main

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        nonlocal current
        current, before = stream, current
        yield
        current = before

    speculate = Worker.speculate

    def timed(worker: Worker, tokens: Any, draft: Any) -> Iterator[None]:
        for pause in speculate(worker, tokens, draft):
            current.at += now["step"]
            yield pause

    monkeypatch.setattr(Worker, "speculate", timed)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    model = TableLM(random_table(0, 8))
    helper = StreamHelper(model, model, GREEDY, 40, False)  # type: ignore[arg-type]
    helper.prefill([0, 1, 2])

    def run(verify_s: float, tree_s: float) -> Settled:
        now["step"] = tree_s / 4  # the guesses, and three tokens of their drafts
        helper.speculate([0, 1, 2, 3], [1, 2, 3])
        main.at += verify_s
        return helper.settle(0, 5)

    yield run
    helper.close()


def test_at_first_verification_and_tree_are_timed_alone(run_round: Round) -> None:
    for _ in range(ALONE_ROUNDS):
        speculation = run_round(0.010, 0.004).speculation
        assert speculation.overlap == "none"
        assert speculation.hidden_s == 0.0
        assert speculation.build_s == pytest.approx(0.004)
        assert speculation.known_s == pytest.approx(0.014)


@pytest.mark.parametrize(
    ("verify_s", "tree_s", "hidden_s"),
    [
        (0.010, 0.004, 0.004),  # neither is any slower for the other
        (0.012, 0.006, 0.002),  # half of the tree was paid for by a longer verification
        (0.014, 0.014, 0.0),  # side by side, and no sooner done
        (0.020, 0.014, 0.0),
        (0.010, 0.013, 0.001),  # the tree is waited for
    ],
)
def test_then_hidden_is_what_was_saved(run_round: Round, verify_s: float, tree_s: float, hidden_s: float) -> None:
    run_round(0.500, 0.300)  # what happens once
    for _ in range(ALONE_ROUNDS - 1):
        run_round(0.010, 0.004)
    speculation = run_round(verify_s, tree_s).speculation
    assert speculation.overlap == "stream"
    assert speculation.hidden_s == pytest.approx(hidden_s)
    assert speculation.build_s == pytest.approx(0.004)
    assert speculation.built_s == pytest.approx(tree_s)
    assert 0.0 < speculation.guessed_s <= speculation.known_s


def test_no_more_is_hidden_than_the_shorter_of_both() -> None:
    assert hidden(0.010, 0.004, 0.008) == 0.004
    assert hidden(0.004, 0.010, 0.008) == 0.004
