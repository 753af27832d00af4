"""Code for this processor, made while the program runs: `Builder` writes LLVM's instructions, llvmlite compiles them.

A kernel is a function of a thread's share: `share(call, thread, threads)`, `call` being a record of addresses and
numbers. All shares of a call run at once, on the OpenMP threads that torch itself uses, because two sets of threads
would fight for the processors. Vectors are of eight float32, AVX2's width.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from llvmlite import binding, ir

from .cache_folder import cache_folder

LANES = 8
BYTE, SHORT, INT, LONG, HALF, FLOAT = (*(ir.IntType(bits) for bits in (8, 16, 32, 64)), ir.HalfType(), ir.FloatType())
POINTER = ir.PointerType()
FLOATS, INTS = ir.VectorType(FLOAT, LANES), ir.VectorType(INT, LANES)

_OPENMP = ("omp_get_thread_num", "omp_get_num_threads")

_compiling = threading.Lock()
_engines: list[Any] = []
"""Whose code goes with them."""


def record(**fields: Any) -> Callable[..., bytes]:
    """What packs values for a kernel whose call has these fields: POINTER (an address), LONG or FLOAT each."""
    codes = {POINTER: "P", LONG: "q", FLOAT: "f"}
    return struct.Struct("".join(codes[type_] for type_ in fields.values())).pack


class _Scratch(threading.local):
    memory = torch.empty(0)


_scratch = _Scratch()


def scratch(numbers: int) -> int:
    """The address of so many float32 numbers for this thread's next call of a kernel."""
    if _scratch.memory.numel() < numbers:
        _scratch.memory = torch.empty(numbers)
    return _scratch.memory.data_ptr()


class Kernel:
    """A compiled kernel, whose calls have `fields` (see `record`). `build` writes the share of one thread, given a
    builder, the fields, the thread's number and that of all threads."""

    def __init__(self, fields: dict[str, Any], build: Callable[[Builder, dict[str, Any], Any, Any], None]) -> None:
        openmp = _openmp()
        module = ir.Module()
        share = _function(module, "share", [POINTER, LONG, LONG], internal=True)
        builder = Builder(share.append_basic_block())
        layout, values = ir.LiteralStructType(fields.values()), {}
        for index, (name, type_) in enumerate(fields.items()):
            where = [ir.Constant(INT, 0), ir.Constant(INT, index)]
            address = builder.gep(share.args[0], where, source_etype=layout)
            values[name] = builder.load(address, typ=type_, align=4)
        build(builder, values, share.args[1], share.args[2])
        builder.ret_void()
        _add_entry(module, "alone", share, ())
        if openmp is not None:
            _add_entry(module, "team", share, _OPENMP)
        engine = _compile(module, openmp)
        self._alone = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address("alone"))
        self._team = 0 if openmp is None else engine.get_function_address("team")
        self._start_team = None if openmp is None else openmp.GOMP_parallel

    def __call__(self, call: bytes, threads: int) -> None:
        """All shares of `call`, on so many threads; in this thread alone where torch's OpenMP starts no others."""
        if threads > 1 and self._start_team is not None:
            self._start_team(self._team, call, threads, 0)
        else:
            self._alone(call)


def _compile(module: Any, openmp: Any) -> Any:
    """The module's code, ready to be called. It is kept in the cache folder, for starts to come."""
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    source = "\n".join([str(binding.llvm_version_info), cpu, features, str(module)])
    kept = cache_folder() / "kernels" / hashlib.sha256(source.encode()).hexdigest()
    code = _read(kept)
    with _compiling:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        for name in _OPENMP if openmp is not None else ():
            binding.add_symbol(name, ctypes.cast(getattr(openmp, name), ctypes.c_void_p).value)
        machine = binding.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
        parsed = binding.parse_assembly(str(module))
        parsed.verify()
        if code is None:
            passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
            passes.getModulePassManager().run(parsed, passes)
        engine = binding.create_mcjit_compiler(parsed, machine)
        engine.set_object_cache(lambda _module, made: _write(kept, made), lambda _module: code)
        engine.finalize_object()
        _engines.append(engine)
        return engine


def _read(path: Path) -> bytes | None:
    """What `_write` wrote; None where there is nothing, or not all of it."""
    try:
        digest, code = path.read_bytes().split(b"\n", 1)
    except (OSError, ValueError):
        return None
    return code if hashlib.sha256(code).hexdigest().encode() == digest else None


def _write(path: Path, code: bytes) -> None:
    """Keep `code` where that can be done; it is made again where it cannot."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:
            try:
                file.write(hashlib.sha256(code).hexdigest().encode() + b"\n" + code)
                file.close()
                Path(file.name).replace(path)
            except OSError:
                Path(file.name).unlink()


@cache
def _openmp() -> Any:
    """torch's library, asked for functions of the OpenMP that it is linked with; None where that does not have them."""
    for path in Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"):
        library = ctypes.CDLL(str(path))
        if all(hasattr(library, name) for name in ("GOMP_parallel", *_OPENMP)):
            library.GOMP_parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
            library.GOMP_parallel.restype = None
            return library
    return None


def _function(module: Any, name: str, parameters: Sequence[Any], internal: bool = False) -> Any:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), parameters), name)
    if internal:
        function.linkage = "internal"
    return function


def _add_entry(module: Any, name: str, share: Any, tell: Sequence[str]) -> None:
    """`name(call)`: the share of the thread that the functions `tell` tell of, or the only one."""
    entry = _function(module, name, [POINTER])
    builder = Builder(entry.append_basic_block())
    told = [builder.call(ir.Function(module, ir.FunctionType(INT, []), function), []) for function in tell]
    position = [builder.zext(one, LONG) for one in told] or [builder.long(0), builder.long(1)]
    builder.call(share, [entry.args[0], *position])
    builder.ret_void()


class Loop:
    """A loop under construction. `values` change from turn to turn: what they become is put in `following`. After the
    loop they are what the last turn made of them."""

    def __init__(self, index: Any, values: list[Any]) -> None:
        self.index = index
        self.values = values
        self.following: list[Any] = values


class Builder(ir.IRBuilder):  # type: ignore[misc]
    """llvmlite's builder of instructions, with the phrases that kernels are made of."""

    def long(self, value: int) -> Any:
        return ir.Constant(LONG, value)

    def number(self, value: float) -> Any:
        return ir.Constant(FLOAT, value)

    def zeros(self, type_: Any) -> Any:
        return ir.Constant(type_, None)

    def at(self, base: Any, index: Any, type_: Any) -> Any:
        """The address of element `index`."""
        return self.gep(base, [index], source_etype=type_)

    def read(self, base: Any, index: Any, element: Any, type_: Any = None, align: int = 4) -> Any:
        """What stands at element `index`, as one `element` or as a wider `type_`."""
        return self.load(self.at(base, index, element), typ=type_ or element, align=align)

    def write(self, value: Any, base: Any, index: Any, element: Any, align: int = 4) -> None:
        self.store(value, self.at(base, index, element), align=align)

    def splat(self, value: Any) -> Any:
        """A vector of eight times `value`."""
        vector = ir.VectorType(value.type, LANES)
        single = self.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(INT, 0))
        return self.shuffle_vector(single, single, self.zeros(INTS))

    def intrinsic(self, name: str, result: Any, *arguments: Any) -> Any:
        """A function of LLVM's own."""
        known = self.module.globals.get(name)
        types = [argument.type for argument in arguments]
        return self.call(known or ir.Function(self.module, ir.FunctionType(result, types), name), arguments)

    def fused(self, left: Any, right: Any, total: Any) -> Any:
        """left * right + total, rounded once. Vectors of float32."""
        return self.intrinsic("llvm.fma.v8f32", FLOATS, left, right, total)

    def larger(self, left: Any, right: Any) -> Any:
        return self.select(self.fcmp_ordered(">", left, right), left, right)

    def part(self, number: Any, thread: Any, threads: Any) -> tuple[Any, Any]:
        """The first of a thread's even part of `number` things, and the end of it."""
        ends = (thread, self.add(thread, self.long(1)))
        first, last = (self.udiv(self.mul(number, end), threads) for end in ends)
        return first, last

    def prefetch(self, address: Any) -> None:
        flags = [ir.Constant(INT, number) for number in (0, 3, 1)]  # to read, to be kept, data
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), address, *flags)

    def total(self, vector: Any) -> Any:
        """The sum of a vector's elements, from the first to the last."""
        return self.intrinsic("llvm.vector.reduce.fadd.v8f32", FLOAT, self.number(0.0), vector)

    def largest(self, vector: Any) -> Any:
        return self.intrinsic("llvm.vector.reduce.fmax.v8f32", FLOAT, vector)

    def exponential(self, x: Any) -> Any:
        """exp of a vector to float32's last bits, nan staying nan: a power of two times a polynomial (Cephes, expf)."""
        bounded = self.larger(
            self._constants(-87.0),
            self.select(self.fcmp_ordered("<", x, self._constants(88.0)), x, self._constants(88.0)),
        )
        power = self.intrinsic("llvm.rint.v8f32", FLOATS, self.fmul(bounded, self._constants(1.44269504088896341)))
        rest = self.fused(power, self._constants(-0.693359375), bounded)
        rest = self.fused(power, self._constants(2.12194440e-4), rest)
        value = self._constants(1.9875691500e-4)
        for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            value = self.fused(value, rest, self._constants(factor))
        value = self.fadd(self.fused(value, self.fmul(rest, rest), rest), self._constants(1.0))
        exponent = self.add(self.fptosi(power, INTS), self.splat(ir.Constant(INT, 127)))
        value = self.fmul(value, self.bitcast(self.shl(exponent, self.splat(ir.Constant(INT, 23))), FLOATS))
        return self.select(self.fcmp_unordered("uno", x, x), x, value)

    def _constants(self, value: float) -> Any:
        return ir.Constant(FLOATS, [self.number(value)] * LANES)

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1, values: Sequence[Any] = ()) -> Iterator[Loop]:
        """What is built inside, for every index start, start + step, ... below stop."""
        before = self.block
        head, body, done = (self.append_basic_block(name) for name in ("head", "body", "done"))
        self.branch(head)
        self.position_at_end(head)
        phis = [self.phi(value.type) for value in (start, *values)]
        for phi, value in zip(phis, (start, *values), strict=True):
            phi.add_incoming(value, before)
        loop = Loop(phis[0], phis[1:])
        self.cbranch(self.icmp_unsigned("<", loop.index, stop), body, done)
        self.position_at_end(body)
        yield loop
        following = [self.add(loop.index, ir.Constant(loop.index.type, step)), *loop.following]
        for phi, value in zip(phis, following, strict=True):
            phi.add_incoming(value, self.block)
        self.branch(head)
        self.position_at_end(done)
