"""Any causal language model, run by transformers' own forward: the path for architectures without a faster one.

Its cache keeps every position in every layer, also where the model attends to a sliding window only (the mask sees to
that), so rollback is one crop and a window crossed during a run stays exact.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..errors import ModelUnavailable


def rollback_obstacle(model: Any) -> str | None:
    """Why the model's cache cannot forget single positions (recurrent and hybrid models, or none at all), or None if
    it can."""
    if not _cache_keyword(model):
        return "it takes no key-value cache"
    layers = DynamicCache(config=model.config).layers
    recurrent = next((type(layer).__name__ for layer in layers if hasattr(layer, "recurrent_states")), None)
    if recurrent or getattr(model, "_is_stateful", False):
        return "it keeps a running state that cannot be rolled back after a rejected draft"
    return None


def _cache_keyword(model: Any) -> str:
    """Name of the cache's argument, which changed in transformers 5.2x; "" where the model has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in parameters), "")


class TransformersLM:
    """`LanguageModel` over a loaded transformers model. Raises ModelUnavailable where its cache cannot roll back."""

    def __init__(
        self,
        model: Any,
        name: str,
        precision: str,
        vocab_size: int,
        context_length: int,
        reason: str = "",
    ) -> None:
        if obstacle := rollback_obstacle(model):
            raise ModelUnavailable(
                f"{name} cannot run here: {obstacle}. Choose a model with an ordinary attention cache."
            )
        self.model = model
        self.name = name
        self.precision = precision
        self.forward_path = f"transformers ({reason or model.config.model_type})"
        self.embedding: Tensor = model.get_input_embeddings().weight  # [rows, hidden], never quantized
        self.device: torch.device = self.embedding.device
        self.devices = frozenset(weight.device for weight in model.parameters())  # see `base.devices_of`
        self.dtype: torch.dtype = model.dtype
        self.vocab_size = vocab_size
        self.vocab_ids: Tensor | None = None
        self.context_length = context_length
        self.cache_keyword = _cache_keyword(model)

    def open(self, capacity: int) -> TransformersCachedLM:
        return TransformersCachedLM(self, capacity)


class TransformersCachedLM:
    """`CachedLM` over a DynamicCache. It is given no config, so that no layer drops positions on its own."""

    def __init__(self, lm: TransformersLM, capacity: int) -> None:
        self._lm = lm
        self._capacity = capacity
        self._cache = DynamicCache()
        self._cached = 0

    @property
    def cached(self) -> int:
        return self._cached

    @torch.inference_mode()
    def extend(self, ids: Tensor, keep: int) -> Tensor:
        count = ids.shape[0]
        if self._cached + count > self._capacity:
            raise ValueError(f"{self._cached} + {count} positions are more than the cache's {self._capacity}")
        output = self._lm.model(
            input_ids=ids.to(self._lm.device)[None],
            use_cache=True,
            logits_to_keep=keep,
            **{self._lm.cache_keyword: self._cache},
        )
        self._cached += count
        # the head may lie on another card than the embeddings
        logits: Tensor = output.logits[0, -keep:, : self._lm.vocab_size].float().to(self._lm.device)
        return logits

    def truncate(self, length: int) -> None:
        surplus = self._cached - length
        if surplus > 0:
            self._cache.crop(-surplus)
            self._cached = length

    def close(self) -> None:
        self._cache = DynamicCache()
        self._cached = 0
