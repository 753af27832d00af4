"""Who has which processor while target and helper work at once: the helper the last one, the target all others.

Two processes that are not kept apart take turns on one processor, and a product that is spread over several waits for
its slowest part. The division holds only while the helper computes: before, after, and as soon as it has made its
drafts the target has all processors, in the middle of a pass too.
"""

from __future__ import annotations

import os

import torch


class Cores:
    """The processors of the calling thread. `helper` is the one that `share` leaves to the helper."""

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self._threads = torch.get_num_threads()
        self.helper = max(self._all)
        self._target = self._all - {self.helper} or self._all
        self._shared = False

    def share(self) -> None:
        """Leave the helper its processor."""
        os.sched_setaffinity(0, self._target)
        torch.set_num_threads(min(self._threads, len(self._target)))
        self._shared = True

    def take_back(self) -> None:
        """All processors for the target again; a no-op where it has them."""
        if self._shared:
            os.sched_setaffinity(0, self._all)
            torch.set_num_threads(self._threads)
            self._shared = False
