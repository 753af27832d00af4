"""Attention of a few positions at the end of a cache, from the rows behind the query-key-value product to the rows
before the output product: rotate, write keys and values into the cache, attend.

By torch's operations that takes a dozen, each as long as its start; here it is one call. Queries that share a key head
are taken six at a time, so that a block of keys or values read once serves them all. A query's scores, their softmax
and its sum of values are computed in the order of positions whatever stands beside it, so its result has the same bits
in any company.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from .native import (
    FLOAT,
    FLOATS,
    INT,
    INTS,
    LANES,
    LONG,
    POINTER,
    Builder,
    Kernel,
    record,
    scratch,
)

_TOGETHER = 6
_BLOCK = 64  # positions


_FIELDS = {
    **dict.fromkeys(("rows", "rotations", "keys", "values", "attended", "scratch"), POINTER),
    **dict.fromkeys(("start", "count", "groups", "heads", "positions", "rotate"), LONG),
}
_call = record(**_FIELDS)


def attend_few(rows: Tensor, memory: Tensor, start: int, rotations: Tensor | None) -> Tensor:
    """float32 [n, groups * kv_heads * head_dim] for n positions from `start` on.

    rows: float32 [n, groups + 2, kv_heads, head_dim], contiguous, pairs of features side by side (`rope.pair_up`):
    queries by group, keys, values. memory: float32 [2, kv_heads, positions, head_dim], keys and values of one layer,
    whose number of positions is a multiple of 8; the new ones are written at start, ... rotations: complex64 by
    position, [length, kinds, head_dim / 2], of which the first kind is used (`rope.Rope.table`); None: not rotated.
    """
    count, parts, heads, width = rows.shape
    threads = torch.get_num_threads()
    attended = rows.new_empty(count, (parts - 2) * heads * width)
    keys, positions = memory.data_ptr(), memory.shape[2]
    call = _call(
        rows.data_ptr(), 0 if rotations is None else rotations.data_ptr(),
        keys, keys + 4 * heads * positions * width, attended.data_ptr(),
        scratch(threads * _TOGETHER * (width + start + count + LANES)),
        start, count, parts - 2, heads, positions, rotations is not None,
    )  # fmt: skip
    attention_kernel(width)(call, threads)
    return attended


@cache
def attention_kernel(head_dim: int) -> Kernel:
    """What `attend_few` runs for heads of this size, a multiple of 8. Compiled by the first call."""
    return Kernel(_FIELDS, _Writer(head_dim).share)


class _Writer:
    """Writes the kernel for heads of one size."""

    def __init__(self, head_dim: int) -> None:
        self._width = head_dim
        self._pieces = range(0, head_dim, LANES)

    def share(self, build: Builder, call: dict[str, Any], thread: Any, threads: Any) -> None:
        """One thread's part of the sixes of queries. New keys and values are written by every thread, all of them:
        then each has seen those that it reads, and none waits for another."""
        count, heads, groups, start = call["count"], call["heads"], call["groups"], call["start"]
        width = build.long(self._width)
        self._write_cache(build, call)
        queries = build.mul(count, groups)
        tiles = build.udiv(build.add(queries, build.long(_TOGETHER - 1)), build.long(_TOGETHER))
        items = build.mul(tiles, heads)
        span = build.add(build.add(start, count), build.long(LANES))
        own = build.mul(build.long(_TOGETHER), build.add(span, width))
        turned = build.at(call["scratch"], build.mul(thread, own), FLOAT)  # [6, head_dim]
        scores = build.at(turned, build.long(_TOGETHER * self._width), FLOAT)  # [6, span]
        first, last = build.part(items, thread, threads)
        with build.loop(first, last) as item:
            head, tile = build.udiv(item.index, tiles), build.urem(item.index, tiles)
            begin = build.mul(tile, build.long(_TOGETHER))
            number = self._least(build, build.sub(queries, begin), build.long(_TOGETHER))
            memory = build.mul(build.mul(head, call["positions"]), width)
            keys, values = (build.at(call[name], memory, FLOAT) for name in ("keys", "values"))

            def place(index: Any, begin: Any = begin, head: Any = head) -> tuple[Any, Any]:
                """Of a query of this six: its row, and where it stands among the row's queries."""
                query = build.add(begin, index)
                row, group = build.udiv(query, groups), build.urem(query, groups)
                return row, build.mul(build.add(build.mul(group, heads), head), width)

            def reach(index: Any) -> Any:
                """How many positions a query of this six reads."""
                return build.add(build.add(start, place(index)[0]), build.long(1))

            with build.loop(build.long(0), number) as query:
                row, offset = place(query.index)
                source = build.at(self._row(build, call, row), offset, FLOAT)
                self._rotate(build, call, row, source, build.at(turned, build.mul(query.index, width), FLOAT))
            longest = reach(build.sub(number, build.long(1)))
            with build.loop(build.long(0), longest, _BLOCK) as block, build.loop(build.long(0), number) as query:
                stop = self._least(build, build.add(block.index, build.long(_BLOCK)), reach(query.index))
                here = build.at(turned, build.mul(query.index, width), FLOAT)
                line = build.at(scores, build.mul(query.index, span), FLOAT)
                with build.loop(block.index, stop, LANES) as key:
                    near = build.at(keys, build.mul(key.index, width), FLOAT)
                    build.write(self._eight_scores(build, here, near), line, key.index, FLOAT)
            with build.loop(build.long(0), number) as query:
                self._softmax(build, build.at(scores, build.mul(query.index, span), FLOAT), reach(query.index))
                row, offset = place(query.index)
                for piece in self._pieces:
                    target = build.at(self._attended(build, call, row), offset, FLOAT)
                    build.write(build.zeros(FLOATS), target, build.long(piece), FLOAT)
            with build.loop(build.long(0), longest, _BLOCK) as block, build.loop(build.long(0), number) as query:
                stop = self._least(build, build.add(block.index, build.long(_BLOCK)), reach(query.index))
                line = build.at(scores, build.mul(query.index, span), FLOAT)
                row, offset = place(query.index)
                self._add_values(
                    build, line, values, block.index, stop, build.at(self._attended(build, call, row), offset, FLOAT)
                )

    def _least(self, build: Builder, left: Any, right: Any) -> Any:
        return build.select(build.icmp_unsigned("<", left, right), left, right)

    def _row(self, build: Builder, call: dict[str, Any], row: Any) -> Any:
        parts = build.mul(build.add(call["groups"], build.long(2)), call["heads"])
        return build.at(call["rows"], build.mul(row, build.mul(parts, build.long(self._width))), FLOAT)

    def _attended(self, build: Builder, call: dict[str, Any], row: Any) -> Any:
        parts = build.mul(call["groups"], call["heads"])
        return build.at(call["attended"], build.mul(row, build.mul(parts, build.long(self._width))), FLOAT)

    def _write_cache(self, build: Builder, call: dict[str, Any]) -> None:
        heads, width = call["heads"], build.long(self._width)
        with build.loop(build.long(0), call["count"]) as row, build.loop(build.long(0), heads) as head:
            before = build.mul(call["groups"], heads)
            new = build.at(self._row(build, call, row.index), build.mul(build.add(before, head.index), width), FLOAT)
            position = build.add(build.mul(head.index, call["positions"]), build.add(call["start"], row.index))
            slot = build.mul(position, width)
            self._rotate(build, call, row.index, new, build.at(call["keys"], slot, FLOAT))
            value = build.at(new, build.mul(heads, width), FLOAT)
            for piece in self._pieces:
                part = build.read(value, build.long(piece), FLOAT, FLOATS)
                build.write(part, build.at(call["values"], slot, FLOAT), build.long(piece), FLOAT)

    def _rotate(self, build: Builder, call: dict[str, Any], row: Any, source: Any, target: Any) -> None:
        """Copy a head's features, rotated by its position: pairs are complex numbers, and so are rotations."""
        position = build.mul(
            build.add(call["start"], row), build.long(2 * self._width)
        )  # two kinds, two numbers a pair
        rotate = build.icmp_unsigned("!=", call["rotate"], build.long(0))
        with build.if_else(rotate) as (then, otherwise):
            with then:
                table = build.at(call["rotations"], position, FLOAT)
                for piece in self._pieces:
                    part = build.read(source, build.long(piece), FLOAT, FLOATS)
                    turn = build.read(table, build.long(piece), FLOAT, FLOATS)
                    cosines = self._pick(build, turn, turn, [0, 0, 2, 2, 4, 4, 6, 6])
                    sines = self._pick(build, turn, turn, [1, 1, 3, 3, 5, 5, 7, 7])
                    sines = build.fmul(sines, ir.Constant(FLOATS, [build.number(sign) for sign in (-1.0, 1.0) * 4]))
                    swapped = self._pick(build, part, part, [1, 0, 3, 2, 5, 4, 7, 6])
                    value = build.fused(swapped, sines, build.fmul(part, cosines))
                    build.write(value, target, build.long(piece), FLOAT)
            with otherwise:
                for piece in self._pieces:
                    part = build.read(source, build.long(piece), FLOAT, FLOATS)
                    build.write(part, target, build.long(piece), FLOAT)

    def _eight_scores(self, build: Builder, query: Any, keys: Any) -> Any:
        """The products of a query with eight keys that follow each other."""
        sums = []
        for key in range(LANES):
            total = None
            for piece in self._pieces:
                part = build.read(keys, build.long(key * self._width + piece), FLOAT, FLOATS)
                own = build.read(query, build.long(piece), FLOAT, FLOATS)
                total = build.fmul(own, part) if total is None else build.fused(own, part, total)
            sums.append(total)
        for evens, odds in (
            ([0, 8, 2, 10, 4, 12, 6, 14], [1, 9, 3, 11, 5, 13, 7, 15]),
            ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
            ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
        ):  # the eight vectors' sums come to stand side by side
            pairs = zip(sums[::2], sums[1::2], strict=True)
            sums = [build.fadd(self._pick(build, *pair, evens), self._pick(build, *pair, odds)) for pair in pairs]
        return sums[0]

    def _pick(self, build: Builder, left: Any, right: Any, places: list[int]) -> Any:
        return build.shuffle_vector(left, right, ir.Constant(INTS, [ir.Constant(INT, place) for place in places]))

    def _softmax(self, build: Builder, line: Any, length: Any) -> None:
        """Of scores / sqrt(head_dim), in place; behind `length` there are zeros up to the next multiple of eight."""
        lowest = build.splat(build.number(float("-inf")))
        scale = build.splat(build.number(self._width**-0.5))
        count = ir.Constant(INTS, [ir.Constant(INT, lane) for lane in range(LANES)])

        def seen(index: Any) -> Any:
            lanes = build.add(build.splat(build.trunc(index, INT)), count)
            return build.icmp_signed("<", lanes, build.splat(build.trunc(length, INT)))

        with build.loop(build.long(0), length, LANES, [lowest]) as part:
            score = build.select(seen(part.index), build.read(line, part.index, FLOAT, FLOATS), lowest)
            part.following = [build.larger(score, part.values[0])]
        highest = build.splat(build.largest(part.values[0]))
        with build.loop(build.long(0), length, LANES, [build.zeros(FLOATS)]) as part:
            below = build.fmul(build.fsub(build.read(line, part.index, FLOAT, FLOATS), highest), scale)
            weight = build.select(seen(part.index), build.exponential(below), build.zeros(FLOATS))
            build.write(weight, line, part.index, FLOAT)
            part.following = [build.fadd(part.values[0], weight)]
        share = build.splat(build.fdiv(build.number(1.0), build.total(part.values[0])))
        with build.loop(build.long(0), length, LANES) as part:
            build.write(build.fmul(build.read(line, part.index, FLOAT, FLOATS), share), line, part.index, FLOAT)

    def _add_values(self, build: Builder, line: Any, values: Any, start: Any, stop: Any, target: Any) -> None:
        """Add to `target` the values of positions start .. stop - 1, each times its weight in `line`."""
        sums = [build.read(target, build.long(piece), FLOAT, FLOATS) for piece in self._pieces]
        with build.loop(start, stop, 1, sums) as position:
            weight = build.splat(build.read(line, position.index, FLOAT))
            near = build.at(values, build.mul(position.index, build.long(self._width)), FLOAT)
            parts = [build.read(near, build.long(piece), FLOAT, FLOATS) for piece in self._pieces]
            position.following = [
                build.fused(part, weight, total) for part, total in zip(parts, position.values, strict=True)
            ]
        for piece, total in zip(self._pieces, position.values, strict=True):
            build.write(total, target, build.long(piece), FLOAT)
