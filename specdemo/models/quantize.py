"""Weights in 8 or 4 bits through bitsandbytes, an optional dependency that is imported only when it was chosen.

int8 is LLM.int8() without its split of outlier features (`llm_int8_threshold=0`): which features stand out is told by
all rows of a call together, so a position's result would depend on the drafts after it. NF4 is used with double
quantization. Both leave embeddings, head and norms in the type that is computed in. A quantized model is never moved:
it is loaded where it shall stay.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from ..errors import ModelUnavailable
from .base import LanguageModel
from .transformers_lm import TransformersLM

KINDS = ("int8", "nf4")

_INT8_CAPABILITY = (7, 5)


def bitsandbytes_obstacle() -> str | None:
    """Why bitsandbytes cannot be used here, one sentence, or None if it can. Imports it."""
    try:
        import bitsandbytes
        from bitsandbytes.cextension import ErrorHandlerMockBNBNativeLibrary, lib
    except ImportError:
        return "bitsandbytes is not installed, so 8 and 4 bit are left out: `pip install bitsandbytes` adds them."
    except Exception as error:  # a library for another CUDA, a broken installation: it fails in many ways
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"bitsandbytes is broken here ({reason}), so 8 and 4 bit are left out: reinstall it."
    if isinstance(lib, ErrorHandlerMockBNBNativeLibrary):
        return (
            f"bitsandbytes {bitsandbytes.__version__} has no library for this machine, so 8 and 4 bit are left out: "
            "install the version for your CUDA."
        )
    return None


def card_obstacle(kind: str, device: torch.device) -> str | None:
    """Why `kind` has no kernels on `device`, or None."""
    if device.type == "mps":
        return f"{kind} has no kernels on Apple's MPS: choose --quantize none"
    if device.type == "cuda" and kind == "int8" and torch.cuda.get_device_capability(device) < _INT8_CAPABILITY:
        return "int8 needs a card of compute capability 7.5: choose --quantize nf4"
    return None


def load_quantized(
    folder: Path,
    config: Any,
    name: str,
    kind: str,
    compute: str,
    device: torch.device,
    vocab_size: int,
    room: Mapping[int | str, int] | None = None,
) -> LanguageModel:
    """The model in `folder` with the products inside its layers in `kind`, the rest in `compute` ("float32", ...;
    "auto": float32 on a processor, else the 16-bit type that the model was stored in).

    room: bytes of weights by device, for accelerate, where one device is not enough. Raises ModelUnavailable.
    """
    if obstacle := bitsandbytes_obstacle():
        raise ModelUnavailable(obstacle)
    if obstacle := card_obstacle(kind, device):
        raise ModelUnavailable(f"{name} cannot be loaded: {obstacle}.")
    from transformers import AutoModelForCausalLM

    transformers_logging.disable_progress_bar()
    # it says at every product that the inputs are rounded to 8 bits by way of float16
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    dtype = getattr(torch, compute) if compute != "auto" else _compute_dtype(config, device)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        quantization_config=_settings(kind, dtype),
        device_map="auto" if room else {"": device},
        max_memory=room,
        use_safetensors=True,
        trust_remote_code=False,
    ).eval()
    text = config.get_text_config()
    context = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048)
    reason = f"{text.model_type}, {kind} by bitsandbytes"
    return TransformersLM(model, name, kind, min(vocab_size, int(text.vocab_size)), context, reason)


def _compute_dtype(config: Any, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    bfloat16 = config.dtype == torch.bfloat16 and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if bfloat16 else torch.float16


def _settings(kind: str, compute: torch.dtype) -> Any:
    from transformers import BitsAndBytesConfig

    if kind == "int8":
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute,
    )
