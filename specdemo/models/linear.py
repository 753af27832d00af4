"""Matrix-vector products as fast as this processor reads weights, one class for each way to keep a weight.

Decoding one sequence multiplies a handful of rows with every weight of the model, so a forward costs what its bytes
cost: fewer bytes per weight, laid out once in the order in which the kernel reads them. On the CPU

- `float32`: packed for oneDNN;
- `bfloat16`: packed for oneDNN where the processor multiplies bfloat16 itself (AVX512-BF16 or AMX), plain elsewhere;
- `float16`: 16-bit weights, activations and sums in float32, through `panels` (x86 with AVX2);
- `int8`: 8-bit weights with a scale per output, activations in 16 bits with a step per row, through the same.

Other devices use their library's own product in float32, bfloat16 or float16.

A row's result never depends on the other rows in the call, or verification would not be lossless: that is why in int8
each row has a step of its own, where torch's usual dynamic quantization looks at all rows.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class Linear(Protocol):
    """A product with a weight, with what stands around it in a decoder. All tensors are of the activations' dtype."""

    def __call__(self, rows: Tensor) -> Tensor:
        """[n, inputs] -> [n, outputs]."""
        ...

    def add_to(self, residual: Tensor, rows: Tensor) -> None:
        """Add the product of `rows` to `residual` [n, outputs]."""
        ...

    def add_gated_to(self, residual: Tensor, gate_up: Tensor) -> None:
        """Add the product of silu(gate) * up, the halves of gate_up [n, 2 * inputs]."""
        ...


PRECISIONS = ("float32", "bfloat16", "float16", "int8")
_PANELS = ("float16", "int8")
"""Those that kernels of our own serve on a CPU."""

_NEEDED = ("avx2", "fma", "f16c")
_ONEDNN_ROWS = 8
"""Rows that oneDNN lays a weight out for. With it, results are bit for bit the same for any number of rows."""


def precision_obstacle(precision: str, device: torch.device) -> str | None:
    """Why `precision` cannot be had on `device`, or None if it can."""
    if precision not in PRECISIONS:
        return f"there is no precision {precision!r}: choose one of {', '.join(PRECISIONS)}"
    if device.type != "cpu":
        return "int8 runs on x86 processors only" if precision == "int8" else None
    if precision in _PANELS and (missing := kernel_obstacle()):
        return f"{precision} needs {missing} here: choose float32 or bfloat16"
    return None


@cache
def kernel_obstacle() -> str | None:
    """What this machine lacks for kernels of our own (see `native`), or None. llvmlite is imported only where they run:
    beside a card nothing needs it."""
    try:
        from llvmlite import binding
    except ImportError:
        return "the package llvmlite"
    features = binding.get_host_cpu_features()
    return None if all(features.get(name) for name in _NEEDED) else "an x86 processor with AVX2"


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


def pack_linear(weight: Tensor, bias: Tensor | None, precision: str) -> Linear:
    """A product with `weight` [outputs, inputs] (any float dtype) plus `bias` [outputs], kept in `precision` on the
    weight's device. Raises ValueError where a weight is out of the precision's range."""
    if weight.device.type == "cpu" and precision in _PANELS:
        return PanelLinear(weight, bias, precision)
    return _pack_plain(weight, bias, precision)


def _pack_plain(weight: Tensor, bias: Tensor | None, precision: str) -> PlainLinear | OneDnnLinear:
    dtype = activation_dtype(precision, weight.device)
    blocked = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    if blocked and (precision == "float32" or _bfloat16_in_hardware()):
        return OneDnnLinear(weight, bias, dtype)
    return PlainLinear(weight, bias, dtype)


def pack_normed(weight: Tensor, bias: Tensor | None, precision: str, gain: Tensor, eps: float) -> Linear:
    """The product of `weight` with the root mean square norm of its rows, scaled by `gain` [inputs]: with
    x / sqrt(mean(x^2) + eps) * gain (Zhang and Sennrich 2019, equation 4, and eps).

    Where activations are float32, x / sqrt(mean(x^2) + eps) is sqrt(inputs) * x / sqrt(sum(x^2) + eps * inputs), and
    what does not depend on x goes into the weight."""
    width = gain.shape[0]
    if weight.device.type == "cpu" and activation_dtype(precision, weight.device) == torch.float32:
        weight = weight.float() * (gain.float() * math.sqrt(width))
        if precision in _PANELS:
            return PanelLinear(weight, bias, precision, eps * width)
        return NormedLinear(_pack_plain(weight, bias, precision), unit_norm(eps * width))
    gain = gain.to(activation_dtype(precision, weight.device))
    norm = partial(functional.rms_norm, normalized_shape=(width,), weight=gain, eps=eps)
    return NormedLinear(_pack_plain(weight, bias, precision), norm)


def unit_norm(eps: float) -> Callable[[Tensor], Tensor]:
    """x / sqrt(sum(x^2) + eps) by row, as x / hypot(|x|, sqrt(eps)): three small kernels, where torch's rms_norm takes
    eight on a CPU."""
    floor = torch.tensor(math.sqrt(eps))
    return lambda rows: rows / torch.linalg.vector_norm(rows, 2, 1, True).hypot_(floor)


class _Stepwise(ABC):
    """What stands around a product, by torch's own operations."""

    @abstractmethod
    def __call__(self, rows: Tensor) -> Tensor: ...

    def add_to(self, residual: Tensor, rows: Tensor) -> None:
        residual.add_(self(rows))

    def add_gated_to(self, residual: Tensor, gate_up: Tensor) -> None:
        gate, up = gate_up.chunk(2, 1)
        self.add_to(residual, functional.silu(gate).mul_(up))


class PlainLinear(_Stepwise):
    """torch's own product, any device."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.numbers = weight.to(dtype).contiguous()
        self._bias = None if bias is None else bias.to(dtype)

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self.numbers, self._bias)


class OneDnnLinear(_Stepwise):
    """A weight in oneDNN's blocked layout: float32, or bfloat16 where the processor has it."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.numbers = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype).contiguous(), _ONEDNN_ROWS)
        self._bias = None if bias is None else bias.to(dtype)
        self._multiply = _operator("mkldnn::_linear_pointwise")

    def __call__(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, self.numbers, self._bias, "none", [], "")


class NormedLinear(_Stepwise):
    """A product behind a norm."""

    def __init__(self, linear: PlainLinear | OneDnnLinear, norm: Callable[[Tensor], Tensor]) -> None:
        self._linear, self._norm = linear, norm
        self.numbers = linear.numbers

    def __call__(self, rows: Tensor) -> Tensor:
        return self._linear(self._norm(rows))


class PanelLinear(_Stepwise):
    """A weight in float16 or int8 (see `panels`), activations in float32. Weights beyond float16's range (65504) are
    refused; int8 has a scale per output. Where there is an `eps`, rows are normed first: x / sqrt(sum(x^2) + eps)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, precision: str, eps: float | None = None) -> None:
        from .panels import INT8_MOST, PanelWeight

        weight = weight.float()
        if precision == "int8":
            scales = (weight.abs().amax(1) / INT8_MOST).clamp_(min=torch.finfo(torch.float32).tiny)
            self._weight = PanelWeight((weight / scales[:, None]).round_().to(torch.int8), scales)
        else:
            lowest, highest = weight.aminmax()
            if not max(-lowest, highest) < torch.finfo(torch.float16).max:
                raise ValueError("a weight is out of float16's range")
            self._weight = PanelWeight(weight.half())
        self.numbers = self._weight.numbers
        self._bias = None if bias is None else bias.float()
        self._eps = eps

    def __call__(self, rows: Tensor) -> Tensor:
        eps = self._eps
        product = self._weight.multiply(rows) if eps is None else self._weight.multiply_normed(rows, eps)
        return product if self._bias is None else product.add_(self._bias)

    def add_to(self, residual: Tensor, rows: Tensor) -> None:
        if self._bias is None and self._weight.adds(residual):
            self._weight.add_product(residual, rows)
        else:
            super().add_to(residual, rows)

    def add_gated_to(self, residual: Tensor, gate_up: Tensor) -> None:
        if self._bias is None and self._weight.adds(residual, gated=True):
            self._weight.add_gated_product(residual, gate_up)
        else:
            super().add_gated_to(residual, gate_up)


def _operator(name: str) -> Callable[..., Tensor]:
    """A torch operator, called through the dispatcher itself. `torch.ops` asks every argument for `__torch_function__`
    first, and a packed weight answers by two C++ exceptions: 20 microseconds, as long as a small product takes."""
    return partial(torch._C._dispatch_call_boxed, torch._C._dispatch_find_schema_or_throw(name, ""))


def _bfloat16_in_hardware() -> bool:
    probes = (getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))
    return torch.backends.mkldnn.is_available() and any(probe is not None and probe() for probe in probes)
