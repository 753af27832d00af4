"""Whether two models speak the same ids: read from tokenizer files, with neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import ModelUnavailable

SHARED = 0.9
"""Of the target's tokens, the share that a draft model must have too."""


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id by the folder's tokenizer.json; None where there is none, or of a kind that only its own library
    reads."""
    try:
        described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        listed = described["model"]["vocab"]
        vocabulary = dict(listed) if isinstance(listed, dict) else {piece: id for id, (piece, _) in enumerate(listed)}
        return {**vocabulary, **{token["content"]: token["id"] for token in described.get("added_tokens", ())}}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_same_vocabulary(target: str, ours: Mapping[str, int], draft: str, theirs: Mapping[str, int]) -> None:
    """A draft model speaks the target's ids: every token they share has one id, and they share nearly all. Raises
    ModelUnavailable."""
    shared = ours.keys() & theirs.keys()
    differing = sum(ours[token] != theirs[token] for token in shared)
    if differing or len(shared) < SHARED * len(ours):
        how = f"{differing:,} tokens have other ids" if differing else f"{len(ours) - len(shared):,} tokens are missing"
        raise ModelUnavailable(
            f"{draft} cannot draft for {target}: their tokenizers differ ({how}), so the same ids mean other texts. "
            "Choose a draft model of the target's family, or the method prompt-lookup, which needs none; transformers' "
            f"universal assisted generation takes such a pair (bench --draft none --methods hf-universal --assistant "
            f"{draft})."
        )
