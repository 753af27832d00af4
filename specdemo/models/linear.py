"""Matrix-vector products as fast as this processor reads weights, one class for each way to keep a weight.

Decoding one sequence multiplies a handful of rows with every weight of the model, so a forward costs what its bytes
cost: fewer bytes per weight, laid out once in the order in which the kernel reads them. All kernels are torch's own
(oneDNN and FBGEMM); nothing is compiled here. On the CPU

- `float32`: packed for oneDNN;
- `bfloat16`: packed for oneDNN where the processor multiplies bfloat16 itself (AVX512-BF16 or AMX), plain elsewhere;
- `float16`: 16-bit weights widened in registers, activations and sums in float32 (FBGEMM, x86 with AVX2);
- `int8`: 8-bit weights with a scale per output, activations in 221 levels with a scale per row (FBGEMM, x86 with AVX2).

Other devices use their library's own product in float32, bfloat16 or float16.

A row's result never depends on the other rows in the call, or verification would not be lossless: that is why the
8-bit path derives each row's scale from that row alone, where torch's usual dynamic quantization looks at all rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from .rotation import rotate_blocks

Linear: TypeAlias = Callable[[Tensor], Tensor]
"""[rows, inputs] -> [rows, outputs], both in the activations' dtype; what was put in may be overwritten."""

Inputs: TypeAlias = Literal["plain", "unit", "outliers"]
"""What is known of the rows that come in, of use to int8 only. unit: of length one and rotated (see `rotation`), so
that no feature stands out; outliers: some features do, and are worth a rotation at run time."""

PRECISIONS = ("float32", "bfloat16", "float16", "int8")

_ONEDNN_ROWS = 8
"""Rows that oneDNN lays a weight out for. With it, results are bit for bit the same for any number of rows."""

_INT8_WEIGHT_MAX = 127
_INT8_ACTIVATION_MAX = 110
_INT8_PAIR_MAX = 32767
_INT8_UNIT_LIMIT = 3.6
"""Activations are stored as 0 .. 220, weights as -127 .. 127. AVX2 adds the products of two neighbouring inputs in 16
bits, cutting what is larger: so a weight's scale is chosen such that 220 times the sum of two neighbouring weights of
one sign never exceeds 32767. More levels for activations would leave fewer for weights; here both err about alike. A
rotated row of unit length is cut at 3.6 times its features' root mean square, which one feature in 3,000 reaches."""


def precision_obstacle(precision: str, device: torch.device) -> str | None:
    """Why `precision` cannot be had on `device`, or None if it can."""
    if precision not in PRECISIONS:
        return f"there is no precision {precision!r}: choose one of {', '.join(PRECISIONS)}"
    if device.type != "cpu":
        return "int8 runs on x86 processors only" if precision == "int8" else None
    if precision in ("float16", "int8") and "fbgemm" not in torch.backends.quantized.supported_engines:
        return f"{precision} needs an x86 processor with AVX2 here: choose float32 or bfloat16"
    return None


def best_cpu_precision() -> str:
    """The fastest precision whose results differ from the model's own by 16-bit rounding only."""
    if _bfloat16_in_hardware():
        return "bfloat16"
    return "float32" if precision_obstacle("float16", torch.device("cpu")) else "float16"


def activation_dtype(precision: str, device: torch.device) -> torch.dtype:
    """What goes in and out of a `Linear` of this precision."""
    if device.type == "cpu":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[precision]


def pack_linear(weight: Tensor, bias: Tensor | None, precision: str, inputs: Inputs = "plain") -> Linear:
    """A product with `weight` [outputs, inputs] (any float dtype) plus `bias` [outputs], kept in `precision` on the
    weight's device. Call it inside `packing()`. Raises ValueError where a weight is out of the precision's range."""
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias, activation_dtype(precision, weight.device))
    if precision == "int8":
        return Int8Linear(weight, bias, inputs)
    if precision == "float16":
        return Float16Linear(weight, bias)
    if torch.backends.mkldnn.is_available() and (precision == "float32" or _bfloat16_in_hardware()):
        return OneDnnLinear(weight, bias, activation_dtype(precision, weight.device))
    return PlainLinear(weight, bias, activation_dtype(precision, weight.device))


class PlainLinear:
    """torch's own product, any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)


class OneDnnLinear:
    """A weight in oneDNN's blocked layout: float32, or bfloat16 where the processor has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), _ONEDNN_ROWS)
        self._bias = None if bias is None else bias.to(dtype)
        self._multiply = _operator("mkldnn::_linear_pointwise")

    def __call__(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, self._weight, self._bias, "none", [], "")


class Float16Linear:
    """Weights in float16, everything else in float32. Weights beyond float16's range (65504) are refused."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        weight, bias = weight.float(), None if bias is None else bias.float()
        lowest, highest = weight.aminmax()
        if not max(-lowest, highest) < torch.finfo(torch.float16).max:
            raise ValueError("a weight is out of float16's range")
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight.contiguous(), bias)
        self._multiply = _operator("quantized::linear_dynamic_fp16")

    def __call__(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, self._packed)


class Int8Linear:
    """Weights in int8 with a scale per output, activations in 221 levels with a scale per row, sums in int32.

    The quantizer is given the same scale and zero point whatever the rows hold: each row is first divided by its
    largest magnitude and multiplied back afterwards, or is of unit length already. Integer sums are exact, so a row
    has the same bits in any company.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, inputs: Inputs) -> None:
        weight = rotate_blocks(weight.float()) if inputs == "outliers" else weight.float()
        scale = _int8_scale(weight)
        rounded = (weight / scale[:, None]).round_().to(torch.int8)
        zero = torch.zeros(len(scale), dtype=torch.int64)
        quantized = torch._make_per_channel_quantized_tensor(rounded, scale.double(), zero, 0)
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)
        self._bias = None if bias is None else bias.float()
        self._inputs = inputs
        self._limit = _INT8_UNIT_LIMIT / math.sqrt(weight.shape[1]) if inputs == "unit" else 1.0
        self._step = self._limit / _INT8_ACTIVATION_MAX
        self._multiply = _operator("quantized::linear_with_input_q_dq_qweight_dq_output_fp32")

    def __call__(self, rows: Tensor) -> Tensor:
        if self._inputs == "unit":
            rows.clamp_(-self._limit, self._limit)
            product = self._multiply(rows, self._step, _INT8_ACTIVATION_MAX, self._packed)
        else:
            if self._inputs == "outliers":
                rows = rotate_blocks(rows)
            largest = rows.abs().amax(1, True).clamp_(min=1e-30)  # the infinity norm, one kernel, takes longer
            product = self._multiply(rows.div_(largest), self._step, _INT8_ACTIVATION_MAX, self._packed).mul_(largest)
        return product if self._bias is None else product.add_(self._bias)


def _int8_scale(weight: Tensor) -> Tensor:
    """[outputs]: the smallest scale with which no weight and no sum of two neighbours leaves its range."""
    padded = functional.pad(weight, (0, weight.shape[1] % 2))
    pairs = padded.unflatten(1, (-1, 2))
    same_sign = torch.maximum(pairs.clamp(min=0).sum(2), pairs.clamp(max=0).sum(2).neg_()).amax(1)
    # Each of the two may be rounded up by half a step.
    most = _INT8_PAIR_MAX / (2 * _INT8_ACTIVATION_MAX) - 1
    scale = torch.maximum(weight.abs().amax(1) / _INT8_WEIGHT_MAX, same_sign / most)
    return scale.clamp_(min=torch.finfo(torch.float32).tiny)


def _operator(name: str) -> Callable[..., Tensor]:
    """A torch operator, called through the dispatcher itself. `torch.ops` asks every argument for `__torch_function__`
    first, and a packed weight answers by two C++ exceptions: 20 microseconds, as long as a small product takes."""
    return partial(torch._C._dispatch_call_boxed, torch._C._dispatch_find_schema_or_throw(name, ""))


@contextmanager
def packing() -> Iterator[None]:
    """Around every `pack_linear`, which may then run in several threads: torch packs quantized weights for the engine
    that is selected at that moment, and says of every tensor of a quantized dtype that such tensors are deprecated."""
    before = torch.backends.quantized.engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "fbgemm" in torch.backends.quantized.supported_engines:
            torch.backends.quantized.engine = "fbgemm"
        try:
            yield
        finally:
            torch.backends.quantized.engine = before


def _bfloat16_in_hardware() -> bool:
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return torch.backends.mkldnn.is_available() and any(probe is not None and probe() for probe in probes)
