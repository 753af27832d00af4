"""Names that models go by, for whoever asks before anything heavy is imported."""

from __future__ import annotations

EMBEDDED, EMBEDDED_NAME = "embedded", "SmolLM2-135M-Instruct"
AUTO, NONE = "auto", "none"

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3")
"""Architectures, by transformers' `model_type`, that the lean forward knows. Their tensors have the same names; what
one has and another has not (biases, norms of queries and keys, layers without rotation) is read from the configuration
and the tensors."""


def draft_precision(precision: str, device: str) -> str:
    """What a distilled draft is kept in, on a device of this type, beside a target in `precision`: the same, but 8 bits
    where 16 are widened as they are read (see `linear`). Rounding costs a guess less than reading costs."""
    return "int8" if device == "cpu" and precision == "float16" else precision
