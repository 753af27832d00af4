"""What loaded models really hold, counted tensor by tensor: the measure that a plan's arithmetic is held against.

transformers' modules and bitsandbytes' scales are tensors that can be asked for. The lean forward's packed products are
opaque; they are unpacked one by one and their numbers counted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .base import LanguageModel
from .lean import LeanLM
from .linear import Float16Linear
from .transformers_lm import TransformersLM

_SHARED_TABLE = 512
"""bitsandbytes' code tables, which all its tensors share, have no more numbers than this."""


def weights_held(*models: LanguageModel) -> int:
    """Bytes of weights that these models hold together; what they share counts once. Buffers of runs are not in it, nor
    norms and scales of the lean forward, which are next to nothing."""
    seen: dict[int, int] = {}
    packed = 0
    for model in models:
        if isinstance(model, TransformersLM):
            found = _tensors_of(model.model)
        elif isinstance(model, LeanLM):
            found = iter([model.embedding, *([] if model._offsets is None else [model._offsets])])
            products = [model.head, model._rotation, *(part for layer in model.layers for part in vars(layer).values())]
            packed += sum(
                _packed_bytes(part) for part in products if hasattr(part, "_weight") or hasattr(part, "_packed")
            )
        else:
            continue
        seen |= {tensor.data_ptr(): tensor.nbytes for tensor in found}
    return packed + sum(seen.values())


def _tensors_of(model: Any) -> Iterator[Tensor]:
    """Every tensor of a model of transformers, those of its quantization included."""
    for module in model.modules():
        candidates: list[Any] = list(module.buffers(recurse=False))
        for parameter in module.parameters(recurse=False):
            candidates += [parameter.data, getattr(parameter, "SCB", None)]
            state = getattr(parameter, "quant_state", None)
            if state is not None:
                candidates += [state.absmax, state.state2.absmax if state.nested else None]
        state = getattr(module, "state", None)
        candidates += [getattr(state, "CB", None), getattr(state, "SCB", None)]
        yield from (one for one in candidates if isinstance(one, Tensor) and one.numel() > _SHARED_TABLE)


def _packed_bytes(product: Any) -> int:
    """The weights of one packed product."""
    if hasattr(product, "_weight"):
        return int(product._weight.numel()) * int(product._weight.dtype.itemsize)
    if isinstance(product, Float16Linear):
        return 2 * int(torch.ops.quantized.linear_unpack_fp16(product._packed)[0].numel())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors of a quantized dtype are deprecated
        return int(torch.ops.quantized.linear_unpack(product._packed)[0].numel())
