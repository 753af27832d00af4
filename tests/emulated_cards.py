"""Cards that are not there: tensors that know which card they lie on, and streams and events that know whose they are.

The processor computes; what would fail with real cards fails here too: a call with tensors of two cards, or of a card
and the processor, and the time between events of two cards. A card has done what it is told when the call returns, so
an event is stamped with the host's time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
GIB = 1 << 30

_FACTORIES = ("tensor", "zeros", "ones", "full", "empty", "arange")
_MAY_MIX = ("copy_", "__getitem__", "__setitem__")
"""Calls that take a tensor of elsewhere, for its numbers."""


class OnCard(Tensor):
    """A tensor that lies on `card`."""

    card: torch.device
    is_cuda = True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.card

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [*_tensors(args), *_tensors(tuple((kwargs or {}).values()))]
        cards = [tensor.card for tensor in tensors if isinstance(tensor, OnCard)]
        if func.__name__ not in _MAY_MIX:
            elsewhere = any(not isinstance(tensor, OnCard) and tensor.dim() for tensor in tensors)
            assert len(set(cards)) == 1, f"{func.__name__} of tensors on {set(cards)}"
            assert not elsewhere, f"{func.__name__} of tensors on {cards[0]} and on the processor"
        result = super().__torch_function__(func, types, args, kwargs or {})
        for tensor in _tensors((result,)):
            tensor.card = cards[0]  # type: ignore[attr-defined]
        return result


def _tensors(values: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, tuple | list):
            found += _tensors(value)
    return found


def on_card(tensor: Tensor, card: torch.device) -> OnCard:
    with torch._C.DisableTorchFunctionSubclass():
        there = tensor.as_subclass(OnCard)
    there.card = card
    return there


class Stream:
    """A card's only one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Stream) -> None:
        self.device, self.at = stream.device, time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Event) -> float:
        assert self.device == later.device, "events of two cards have no common clock"
        return 1000.0 * (later.at - self.at)


class _Current(threading.local):
    device = FIRST


def emulate_cards(monkeypatch: pytest.MonkeyPatch, *memory: int) -> None:
    """Until the end of the test there are cards of so many bytes, two large ones if none are named."""
    sizes = memory or (80 * GIB, 80 * GIB)
    current, move = _Current(), Tensor.to
    streams = {card: Stream(card) for card in (torch.device("cuda", index) for index in range(len(sizes)))}

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        where = next((arg for arg in args if isinstance(arg, torch.device | str)), kwargs.pop("device", None))
        if where is None:
            return move(tensor, *args, **kwargs)
        rest = [arg for arg in args if not isinstance(arg, torch.device | str)]
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.as_subclass(Tensor)
        if torch.device(where) != tensor.device:
            plain = plain.clone()
        moved = move(plain, "cpu", *rest, **kwargs)
        return on_card(moved, torch.device(where)) if torch.device(where).type == "cuda" else moved

    def factory(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, device: torch.device | None = None, **kwargs: Any) -> Tensor:
            if device is None or device.type != "cuda":
                return make(*args, device=device, **kwargs)
            return on_card(make(*args, **kwargs), device)

        return made

    @contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        before, current.device = current.device, device
        try:
            yield
        finally:
            current.device = before

    for name in _FACTORIES:
        monkeypatch.setattr(torch, name, factory(getattr(torch, name)))
    monkeypatch.setattr(Tensor, "to", to)
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: to(tensor, "cpu"))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    told: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: len(sizes),
        "mem_get_info": lambda card: (sizes[getattr(card, "index", card)],) * 2,
        "get_device_capability": lambda _card: (9, 0),
        "is_bf16_supported": lambda including_emulation: True,
    }
    for name, answer in told.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: streams[current.device])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams[device or current.device])
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: on_device(stream.device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
