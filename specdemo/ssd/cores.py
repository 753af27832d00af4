"""Who has which processor while target and helper work at once: the helper the last one, the target all others.

Two processes that are not kept apart take turns on one processor, and a product that is spread over several waits for
its slowest part. The division holds only while a verification runs: as soon as the helper has made its drafts the
target computes on all processors again, in the middle of a pass too.

Of two processors each thread of the target's then has one of its own. Left to the system, the second thread was woken
on the first one's processor and waited there until the next balancing of the load, a third of a pass.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import torch


class Cores:
    """The processors of the calling thread. `helper` is the one that `share` leaves to the helper."""

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self._threads = torch.get_num_threads()
        self.helper = max(self._all)
        self._target = self._all - {self.helper} or self._all
        self._partners = partners() if len(self._all) == self._threads == 2 else []
        self._shared = False

    def share(self) -> None:
        """Leave the helper its processor."""
        os.sched_setaffinity(0, self._target)
        self._place_partners({self.helper})  # without work until `join_in`
        torch.set_num_threads(min(self._threads, len(self._target)))
        self._shared = True

    def join_in(self) -> None:
        """The helper is idle: compute on its processor too."""
        if not self._partners:
            os.sched_setaffinity(0, self._all)
        torch.set_num_threads(self._threads)

    def take_back(self) -> None:
        """All processors for every thread again; a no-op where they have them."""
        if self._shared:
            os.sched_setaffinity(0, self._all)
            self._place_partners(self._all)
            torch.set_num_threads(self._threads)
            self._shared = False

    def _place_partners(self, cores: set[int]) -> None:
        for thread in self._partners:
            with suppress(ProcessLookupError):  # it has ended, and needs no place
                os.sched_setaffinity(thread, cores)


def partners() -> list[int]:
    """The threads that share the calling thread's products, found by watching which of this process's work while it
    computes; none where the system does not tell."""
    matrix = torch.ones(512, 512)
    before = _worked()
    for _ in range(6):
        matrix.mm(matrix)
    worked = {thread: spent - before.get(thread, 0) for thread, spent in _worked().items()}
    own = threading.get_native_id()
    return [thread for thread, spent in worked.items() if thread != own and spent > worked[own] / 4]


def _worked() -> dict[int, int]:
    """Nanoseconds on a processor, by thread of this process; of none where the system does not tell."""
    told: dict[int, int] = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        try:
            told[int(path.parent.name)] = int(path.read_text().split()[0])
        except OSError:
            continue  # a thread that has just ended
    return told or {threading.get_native_id(): 0}
