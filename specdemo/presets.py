"""Pairs of models that go together, as data: hub names, who may fetch them, and the sizes of their layers.

The order is the one in which "auto" tries them: the larger target first. Sizes are kept in the words of the models'
own `config.json`, in `data/models.json`, each with where it was published, so that a plan needs neither network nor
weights. What could not be confirmed is not there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from .errors import BadRequest

EMBEDDED_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The hub's name of the model that is embedded, for its sizes."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A target and a draft model of one family, by hub name. `access` is what to do before a gated pair can be fetched;
    empty: anyone can fetch it. `note` is what is special about the pair."""

    name: str
    target: str
    draft: str
    access: str = ""
    note: str = ""

    @property
    def gated(self) -> bool:
        return bool(self.access)


def _licence(whose: str) -> str:
    return (
        f"Both models are gated: accept {whose} on their hub pages, then log in with `hf auth login` or set HF_TOKEN."
    )


_LLAMA, _GEMMA, _MISTRAL = _licence("Meta's licence"), _licence("Google's licence"), _licence("Mistral AI's terms")

PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "mistral-large-7b",
            "mistralai/Mistral-Large-Instruct-2407",
            "mistralai/Mistral-7B-Instruct-v0.3",
            _MISTRAL,
            "The 2407 release: later ones have another tokenizer.",
        ),
        Preset("llama-3.1-70b-8b", "meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", _LLAMA),
        Preset("llama-3-70b-8b", "meta-llama/Meta-Llama-3-70B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct", _LLAMA),
        Preset(
            "codellama-34b-7b",
            "codellama/CodeLlama-34b-Instruct-hf",
            "codellama/CodeLlama-7b-Instruct-hf",
            note="The draft has 16 ids more than the target, for filling in: they are never proposed.",
        ),
        Preset("qwen3-32b-0.6b", "Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"),
        Preset("gemma-3-27b-1b", "google/gemma-3-27b-it", "google/gemma-3-1b-it", _GEMMA),
        Preset("qwen3-14b-0.6b", "Qwen/Qwen3-14B", "Qwen/Qwen3-0.6B"),
        Preset("gemma-3-12b-1b", "google/gemma-3-12b-it", "google/gemma-3-1b-it", _GEMMA),
        Preset("gemma-3-12b-270m", "google/gemma-3-12b-it", "google/gemma-3-270m-it", _GEMMA),
        Preset("qwen3-8b-0.6b", "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"),
        Preset("llama-3.1-8b-1b", "meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", _LLAMA),
        Preset(
            "qwen2.5-7b-0.5b",
            "Qwen/Qwen2.5-7B-Instruct",
            "Qwen/Qwen2.5-0.5B-Instruct",
            note="One tokenizer, padded to 152,064 and 151,936 rows: the padding is never drawn.",
        ),
        Preset("qwen3-4b-0.6b", "Qwen/Qwen3-4B", "Qwen/Qwen3-0.6B"),
        Preset("smollm2-1.7b-360m", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-360M-Instruct"),
        Preset("smollm2-1.7b-135m", "HuggingFaceTB/SmolLM2-1.7B-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"),
        Preset(
            "gpt2-xl-distilgpt2",
            "openai-community/gpt2-xl",
            "distilbert/distilgpt2",
            note="Continues text and has no chat template.",
        ),
        Preset("embedded", "embedded", "auto", note="SmolLM2-135M-Instruct and its distilled draft: needs no hub."),
    )
}


def find(name: str) -> Preset:
    """The preset of that name. Raises BadRequest."""
    try:
        return PRESETS[name]
    except KeyError:
        raise BadRequest(
            f"There is no pair {name!r}: choose auto or one of {', '.join(PRESETS)}, or give --target and --draft."
        ) from None


@cache
def known_configs() -> Mapping[str, Mapping[str, Any]]:
    """Hub name -> what is known of the model without asking the hub, in the keys of its `config.json`. Besides those:
    `source`, where the sizes were published; `published_parameters` and `published_in`, a count to check them by;
    `other_parameters`, of parts that text does not pass through."""
    data = (files(__package__) / "data" / "models.json").read_text(encoding="utf-8")
    return {model["name"]: model for model in json.loads(data)}
