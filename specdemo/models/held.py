"""What loaded models really hold, counted tensor by tensor: the measure that a plan's arithmetic is held against.

transformers' modules and bitsandbytes' scales are tensors that can be asked for, as are the lean forward's products.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from .base import LanguageModel
from .lean import LeanLM
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
            products = [model.head, *(part for layer in model.layers for part in vars(layer).values())]
            # Some are in a layout of oneDNN's, whose address nobody is told; none is shared.
            packed += sum(
                part.numbers.numel() * part.numbers.dtype.itemsize for part in products if hasattr(part, "numbers")
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
