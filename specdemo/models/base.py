"""A language model and its key-value cache, as the engines see them.

A `LanguageModel` is weights; `open()` gives a `CachedLM`, one run's cache over those weights. Two operations are
enough for prefill, decoding, verification and rollback: `extend` feeds whatever is committed and not cached yet
(plus a draft), `truncate` forgets the tail. Nothing outside this package touches a cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, device, dtype


class CachedLM(Protocol):
    """One run's key-value cache over a model's weights. Not shared between runs."""

    @property
    def cached(self) -> int:
        """Positions in the cache."""

    def extend(self, ids: Tensor, keep: int) -> Tensor:
        """Feed `ids` at positions cached, cached + 1, ... and append them to the cache.

        ids: int64 [n], n >= 1, on any device. Returns float32 logits [keep, vocab_size] of the last `keep`
        positions (1 <= keep <= n), valid until the next call. Raises ValueError past the capacity given to `open`.
        """

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on; a no-op where nothing is cached there."""

    def close(self) -> None:
        """Release the cache; idempotent."""


class Branches(Protocol):
    """Several continuations of one cache, which go on side by side and are never adopted into it."""

    def extend(self, ids: Tensor) -> Tensor:
        """Feed one token to every branch: int64 [B] on the model's device. Returns float32 logits [B, vocab_size].
        Raises ValueError past the cache's capacity."""

    def only(self, branch: int) -> None:
        """Drop every branch but this one."""


class BranchingLM(CachedLM, Protocol):
    """A cache that can branch. Branches take room behind it: one position per token and branch."""

    def branches(self, after: Tensor) -> Branches:
        """Branches that continue its first positions: `after` int64 [B] of them, on the model's device. They are good
        until the next `extend` or `truncate`."""


def devices_of(model: LanguageModel) -> frozenset[device]:
    """Where a model's weights lie: on one device, unless its layers are spread over several."""
    devices: frozenset[device] = getattr(model, "devices", frozenset({model.device}))
    return devices


def can_branch(model: LanguageModel) -> bool:
    """Whether what `model.open` gives is a `BranchingLM`."""
    return bool(getattr(model, "branching", False))


def call_between_layers(model: LanguageModel, call: Callable[[], None] | None) -> None:
    """Have `call` called between the layers of a model's eager forwards; None: nothing any more. Without effect on a
    model that does not offer it."""
    if hasattr(model, "between_layers"):
        model.between_layers = call


class LanguageModel(Protocol):
    """Weights on a device, ready to run."""

    name: str
    precision: str  # as shown to users: "float32", "bfloat16", "int8", ...
    forward_path: str  # which forward runs and, where it is the slower one, why: "lean", "transformers (gpt2)"
    device: device
    dtype: dtype  # of the activations
    vocab_size: int  # columns of the logits: cut to the ids that the tokenizer can produce
    vocab_ids: Tensor | None  # int64 [vocab_size], the target's id of each column; None where column = id
    context_length: int

    def open(self, capacity: int) -> CachedLM:
        """A fresh cache for at most `capacity` positions."""
