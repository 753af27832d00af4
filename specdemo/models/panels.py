"""Products of a few rows with a weight in 16 or 8 bits, and what stands before and behind them in a decoder.

A decoding step can be no quicker than its weights are read, and torch's own kernels for 16 and 8 bits need far longer
on processors without AVX-512. This is the classic micro kernel (Goto and van de Geijn 2008, "Anatomy of
High-Performance Matrix Multiplication"): a weight lies in panels of 16 outputs in the order of reading; 16 numbers are
widened in registers and multiplied with one input of up to six rows at a time, whose sums stay in registers; what comes
next is prefetched.

- float16: weights widened to float32, activations and sums in float32;
- int8: activations in 16 bits with a step per row, products of neighbouring inputs summed in int32 (`vpmaddwd`).

The rows may be normed or gated on their way in, and the product added to the residual stream: as small operations of
their own these would take as long as the products do, while the other threads wait.

Every sum is taken in the order of the inputs, whatever the number of rows, so a row has the same bits in any company.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal, TypeAlias

import torch
from llvmlite import ir
from torch import Tensor
from torch.nn import functional

from .native import BYTE, FLOAT, FLOATS, HALF, INT, INTS, LANES, LONG, POINTER, SHORT, Builder, Kernel, record, scratch

Kind: TypeAlias = Literal["float16", "int8"]

INT8_MOST = 127
"""The largest magnitude of an 8-bit weight."""
_PANEL = 16
_ROWS = 6
"""Rows at a time. Their sums take 12 of AVX2's 16 registers, the weights two and an input one."""
_CHUNK = 96
"""Rows a call: every thread prepares all of them for itself."""
_AHEAD = 3072
"""Bytes from a weight that is used to the one that is fetched meanwhile; 2 to 8 thousand do about alike."""

_AS_IS, _NORMED, _GATED = range(3)


_FIELDS = {
    **dict.fromkeys(("weight", "scales", "rows", "product", "scratch"), POINTER),
    **dict.fromkeys(("inputs", "panels", "count", "before", "add"), LONG),
    **dict.fromkeys(("most", "eps"), FLOAT),
}
_call = record(**_FIELDS)


class PanelWeight:
    """A weight [outputs, inputs] of dtype float16, or int8 with `scales` float32 [outputs], laid out in panels."""

    def __init__(self, weight: Tensor, scales: Tensor | None = None) -> None:
        self.outputs, self.inputs = weight.shape
        group = 1 if scales is None else 2
        self._missing = -self.inputs % LANES
        missing_outputs = -self.outputs % _PANEL
        padded = functional.pad(weight, (0, self._missing, 0, missing_outputs))
        self.numbers = padded.view(-1, _PANEL, padded.shape[1] // group, group).transpose(1, 2).contiguous()
        self._even = not missing_outputs
        self._panels, self._padded = len(padded) // _PANEL, padded.shape[1]
        self._scales = None if scales is None else functional.pad(scales.float(), (0, missing_outputs))
        self._weight = self.numbers.data_ptr()
        self._scale = 0 if self._scales is None else self._scales.data_ptr()
        self._most = min(32767, (2**31 - 1) // (INT8_MOST * self.inputs))
        self._kernel = _kernel("float16" if scales is None else "int8")

    def multiply(self, rows: Tensor) -> Tensor:
        """Rows float32 [n, inputs] times the weight: float32 [n, outputs]."""
        return self._run(rows, _AS_IS)

    def multiply_normed(self, rows: Tensor, eps: float) -> Tensor:
        """The same of rows / sqrt(sum of squares + eps)."""
        return self._run(rows, _NORMED, eps)

    def adds(self, residual: Tensor, gated: bool = False) -> bool:
        """Whether `add_product`, or `add_gated_product`, can be used: nothing is padded."""
        return self._even and residual.is_contiguous() and not (gated and self._missing)

    def add_product(self, residual: Tensor, rows: Tensor) -> None:
        """Add the product to `residual` float32 [n, outputs]."""
        self._run(rows, _AS_IS, into=residual)

    def add_gated_product(self, residual: Tensor, gate_up: Tensor) -> None:
        """Add to `residual` the product of silu(gate) * up, these being the halves of gate_up [n, 2 * inputs]."""
        self._run(gate_up, _GATED, into=residual)

    def _run(self, rows: Tensor, before: int, eps: float = 0.0, into: Tensor | None = None) -> Tensor:
        if self._missing:
            rows = functional.pad(rows, (0, self._missing))
        rows = rows.contiguous()
        count, width = rows.shape[0], self._panels * _PANEL
        product = rows.new_empty(count, width) if into is None else into
        threads, add = torch.get_num_threads(), into is not None
        for first in range(0, count, _CHUNK):
            here = min(count - first, _CHUNK)
            call = _call(
                self._weight, self._scale,
                rows.data_ptr() + 4 * first * rows.shape[1], product.data_ptr() + 4 * first * width,
                scratch(threads * (here * (self._padded + 1) + self._padded)),
                self._padded, self._panels, here, before, add, self._most, eps,
            )  # fmt: skip
            self._kernel(call, threads)
        return product if self._even else product[:, : self.outputs].contiguous()


@cache
def _kernel(kind: Kind) -> Kernel:
    return Kernel(_FIELDS, _Writer(kind).share)


class _Writer:
    """Writes the kernel of one kind."""

    def __init__(self, kind: Kind) -> None:
        self._int8 = kind == "int8"
        self._group = 2 if self._int8 else 1  # neighbouring inputs that lie side by side
        self._input = SHORT if self._int8 else FLOAT  # as a tile reads it

    def share(self, build: Builder, call: dict[str, Any], thread: Any, threads: Any) -> None:
        """One thread's part of the panels. What comes before the product is done by every thread for itself, as that
        is quicker than waiting for another."""
        inputs, count, panels = call["inputs"], call["count"], call["panels"]
        steps = build.at(call["scratch"], build.mul(thread, self._scratch(build, count, inputs)), FLOAT)
        values = build.at(steps, build.add(count, inputs), FLOAT)
        read = self._prepare(build, call, steps, values)
        first, last = build.part(panels, thread, threads)
        stride = build.mul(panels, build.long(_PANEL))
        add = build.icmp_unsigned("!=", call["add"], build.long(0))
        tiles = [self._tile(build.module, rows) for rows in range(1, _ROWS + 1)]
        groups = build.udiv(build.add(count, build.long(_ROWS - 1)), build.long(_ROWS))
        with build.loop(first, last) as panel:
            output = build.mul(panel.index, build.long(_PANEL))
            weight = build.at(call["weight"], build.mul(output, inputs), BYTE if self._int8 else HALF)
            scales = build.at(call["scales"], output, FLOAT)
            with build.loop(build.long(0), groups) as group:
                row, next_row = build.part(count, group.index, groups)
                arguments = [
                    weight,
                    build.at(read, build.mul(row, inputs), self._input),
                    build.at(call["product"], build.add(build.mul(row, stride), output), FLOAT),
                    inputs,
                    stride,
                    scales,
                    build.at(steps, row, FLOAT),
                    add,
                ]
                done, most = build.append_basic_block("done"), build.append_basic_block("most")
                choice = build.switch(build.sub(next_row, row), most)
                for number, tile in enumerate(tiles, 1):
                    block = most if number == _ROWS else build.append_basic_block(f"rows{number}")
                    if number < _ROWS:
                        choice.add_case(build.long(number), block)
                    build.position_at_end(block)
                    build.call(tile, arguments)
                    build.branch(done)
                build.position_at_end(done)

    def _scratch(self, build: Builder, count: Any, inputs: Any) -> Any:
        """float32 numbers that a thread needs: a step per row, a gated row, and all rows as the tiles read them."""
        return build.add(build.mul(count, build.add(inputs, build.long(1))), inputs)

    def _prepare(self, build: Builder, call: dict[str, Any], steps: Any, values: Any) -> Any:
        """Norm or gate the rows and, for int8, round them, into `values`; what the products are to be multiplied with
        row by row, into `steps`. Returns where the tiles read."""
        inputs, count = call["inputs"], call["count"]
        normed, gated = (build.icmp_unsigned("==", call["before"], build.long(kind)) for kind in (_NORMED, _GATED))
        one_row = build.at(steps, count, FLOAT)
        width = build.select(gated, build.mul(inputs, build.long(2)), inputs)
        with build.loop(build.long(0), count) as row:
            start = build.mul(row.index, inputs)
            source = build.at(call["rows"], build.mul(row.index, width), FLOAT)
            target = one_row if self._int8 else build.at(values, start, FLOAT)
            with build.if_then(gated):
                self._gate(build, source, target, inputs)
            source = build.select(gated, target, source)
            zero = build.zeros(FLOATS)
            with build.loop(build.long(0), inputs, LANES, [zero, zero]) as part:
                read = build.read(source, part.index, FLOAT, FLOATS)
                largest, squares = part.values
                size = build.intrinsic("llvm.fabs.v8f32", FLOATS, read)
                part.following = [build.larger(size, largest), build.fused(read, read, squares)]
            largest, squares = part.values
            norm = build.fadd(build.total(squares), call["eps"])
            norm = build.fdiv(build.number(1.0), build.intrinsic("llvm.sqrt.f32", FLOAT, norm))
            step = build.select(normed, norm, build.number(1.0))
            if self._int8:
                size = build.larger(build.largest(largest), build.number(1e-30))
                # Where a number is not finite, neither is this, and the row's products are none either.
                odd = build.fmul(build.total(squares), build.number(0.0))
                step = build.fmul(step, build.fadd(build.fdiv(size, call["most"]), odd))
                factor = build.splat(build.fdiv(call["most"], size))
                short = ir.VectorType(SHORT, LANES)
                with build.loop(build.long(0), inputs, LANES) as part:
                    scaled = build.fmul(build.read(source, part.index, FLOAT, FLOATS), factor)
                    whole = build.fptosi(build.intrinsic("llvm.rint.v8f32", FLOATS, scaled), INTS)
                    build.write(build.trunc(whole, short), values, build.add(start, part.index), SHORT, align=2)
            build.write(step, steps, row.index, FLOAT)
        return values if self._int8 else build.select(gated, values, call["rows"])

    def _gate(self, build: Builder, source: Any, target: Any, inputs: Any) -> None:
        """silu(gate) * up, the gate's row being followed by up's."""
        with build.loop(build.long(0), inputs, LANES) as part:
            gate = build.read(source, part.index, FLOAT, FLOATS)
            up = build.read(source, build.add(inputs, part.index), FLOAT, FLOATS)
            one = build.splat(build.number(1.0))
            below = build.fadd(one, build.exponential(build.fsub(build.zeros(FLOATS), gate)))
            build.write(build.fmul(build.fdiv(gate, below), up), target, part.index, FLOAT)

    def _tile(self, module: Any, rows: int) -> Any:
        """tile(weight, inputs of the first row, product, inputs, stride, scales, steps, add): a panel times rows."""
        types = [POINTER, POINTER, POINTER, LONG, LONG, POINTER, POINTER, ir.IntType(1)]
        function = ir.Function(module, ir.FunctionType(ir.VoidType(), types), f"tile{rows}")
        function.linkage = "internal"
        weight, read, product, inputs, stride, scales, steps, add = function.args
        build = Builder(function.append_basic_block())
        lines = [build.at(read, build.mul(inputs, build.long(row)), self._input) for row in range(rows)]
        halves = range(_PANEL // LANES)
        start = [build.zeros(INTS if self._int8 else FLOATS)] * (rows * len(halves))
        with build.loop(build.long(0), inputs, self._group, start) as loop:
            size = _PANEL if self._int8 else 2 * _PANEL
            here = build.at(weight, build.mul(loop.index, build.long(size)), BYTE)
            build.prefetch(build.at(here, build.long(_AHEAD), BYTE))
            weights = [self._weights(build, here, half) for half in halves]
            sums = []
            for row, line in enumerate(lines):
                one = build.splat(build.read(line, loop.index, self._input, INT if self._int8 else FLOAT))
                before = loop.values[row * len(halves) :]
                sums += [self._add(build, weights[half], one, before[half]) for half in halves]
            loop.following = sums
        for row in range(rows):
            line = build.at(product, build.mul(stride, build.long(row)), FLOAT)
            step = build.splat(build.read(steps, build.long(row), FLOAT))
            for half in halves:
                lane = build.long(half * LANES)
                value = loop.values[row * len(halves) + half]
                if self._int8:
                    value = build.fmul(build.sitofp(value, FLOATS), build.read(scales, lane, FLOAT, FLOATS))
                before = build.select(add, build.read(line, lane, FLOAT, FLOATS), build.zeros(FLOATS))
                build.write(build.fadd(before, build.fmul(value, step)), line, lane, FLOAT)
        build.ret_void()
        return function

    def _weights(self, build: Builder, here: Any, half: int) -> Any:
        """A half's weights at `here`: as float32, or in pairs as 16-bit integers."""
        offset = build.long(half * 16)
        if self._int8:
            narrow = build.read(here, offset, BYTE, ir.VectorType(BYTE, 2 * LANES), align=16)
            return build.sext(narrow, ir.VectorType(SHORT, 2 * LANES))
        return build.fpext(build.read(here, offset, BYTE, ir.VectorType(HALF, LANES), align=16), FLOATS)

    def _add(self, build: Builder, weights: Any, inputs: Any, total: Any) -> Any:
        if not self._int8:
            return build.fused(weights, inputs, total)
        pairs = build.bitcast(inputs, ir.VectorType(SHORT, 2 * LANES))
        return build.add(total, build.intrinsic("llvm.x86.avx2.pmadd.wd", INTS, weights, pairs))
