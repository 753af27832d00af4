"""A folder's configuration and tokenizer, by the shortest way there.

transformers' classes check more than the lean forward asks, and importing the one for Llama takes as long as importing
torch. So a Llama whose configuration leaves nothing to a default, as the embedded model's, is read as it stands, and a
tokenizer that is no model's own is read without the registry of all of them. Everything else goes the usual way.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_TOLD = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)

_PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Two names of one class, the later since transformers 5."""


def read_config(folder: Path) -> Any:
    """The configuration in `folder`, enough of it for the lean forward. Raises what transformers' classes raise."""
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = explicit_llama(described)
    return transformers_config(folder) if config is None else config


def transformers_config(folder: Path) -> Any:
    """The configuration in `folder`, an object of the class that transformers has for it."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def explicit_llama(described: Mapping[str, Any]) -> Any | None:
    """`described` as a configuration, if it is a Llama's and complete: plain rotary embedding, every size told."""
    rope = described.get("rope_parameters")
    if described.get("model_type") != "llama" or not isinstance(rope, dict) or set(rope) != {"rope_type", "rope_theta"}:
        return None
    if rope["rope_type"] != "default" or not all(name in described for name in _TOLD):
        return None
    return SimpleNamespace(**{"is_encoder_decoder": False, **described})


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer in `folder`, of transformers' own kind. Raises what its classes raise."""
    path = folder / "tokenizer_config.json"
    described = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if described.get("tokenizer_class") in _PLAIN_TOKENIZERS and (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(folder)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
