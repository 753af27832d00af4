"""A comparison of all methods as a log for the page: one JSON record a line, as `view` writes for a race.

step    m: method that runs, i: its number, n: how many there are, s: how far it is, 0 to 1
row     the fields of `comparison.Row`
winner  m: the fastest method, speedup, usages: [[program, lines of code or a command, own draft], ...]
done    ok: nothing follows
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

from ..compared import Comparison, Progress, Row
from .records import record, significant

STEP_S = 0.25
"""How far a method is comes at most this often."""


def comparison_log(items: Any) -> Iterator[str]:
    """The log's pieces. `items`: a generator of `comparison.Comparison`; it is closed with this one."""
    told, method = 0.0, ""
    with closing(items):
        for item in items:
            if isinstance(item, Progress):
                now = time.monotonic()
                if item.method == method and now - told < STEP_S:
                    continue
                told, method = now, item.method
            yield _record(item)
        yield record("done", ok=True)


def _record(item: Comparison) -> str:
    if isinstance(item, Progress):
        return record("step", m=item.method, i=item.index, n=item.count, s=round(item.share, 3))
    if isinstance(item, Row):
        return record("row", **{name: _short(value) for name, value in asdict(item).items()})
    usages = [[usage.program, usage.code, usage.own_draft] for usage in item.usages]
    return record("winner", m=item.method, speedup=significant(item.speedup), usages=usages)


def _short(value: Any) -> Any:
    return significant(value) if isinstance(value, float) else value
