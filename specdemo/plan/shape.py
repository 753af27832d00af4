"""A model's sizes: every weight by name and dimensions, from its configuration alone or from its files' headers.

A safetensors file begins with the name and dimensions of each of its tensors, so the sizes of a model that is here, or
whose headers the hub tells, are exact. For a model that is known by its configuration only, the same list is made for
the families whose layers are written down below.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import ModelUnavailable

_LONGEST_HEADER = 100 << 20
_LAYER = re.compile(r"^(?:.*?\.)?(?:layers|h)\.\d+(?=\.)")
_NOT_LOADED = re.compile(r"(?:\.attn\.(?:masked_)?bias|rotary_emb\.inv_freq)$")  # made anew, whatever the file says
_TOWER = re.compile(r"vision|multi_modal|audio")


class SizesUnknown(ModelUnavailable):
    """A model whose memory cannot be told beforehand. It may run all the same."""


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor. `kind`: "linear" is what quantization makes small; "embedding", "head" and "other" stay as they are.
    `module` is the part of the model that is placed on a device as a whole."""

    name: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.dims)

    @property
    def kind(self) -> str:
        if _TOWER.search(self.name) or len(self.dims) != 2:
            return "other"
        if self.name.endswith("lm_head.weight"):
            return "head"
        return "linear" if _LAYER.match(self.name) else "embedding"

    @property
    def module(self) -> str:
        layer = _LAYER.match(self.name)
        return layer.group() if layer else self.name.removesuffix(".weight").removesuffix(".bias")


@dataclass(frozen=True, slots=True, eq=False)
class ModelShape:
    """`stored` is the dtype of the file's weights; `lean`: whether the lean forward knows the family;
    `shares_embedding`: a distilled draft, which reads its target's."""

    name: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    context_length: int
    stored: str
    tied: bool
    weights: tuple[Weight, ...]
    lean: bool
    shares_embedding: bool = False

    @property
    def parameters(self) -> int:
        """Numbers that the model consists of; a tied head counts once."""
        return sum(weight.size for weight in self.weights)

    def of_kind(self, *kinds: str) -> int:
        """Numbers in the weights of these kinds."""
        return sum(weight.size for weight in self.weights if weight.kind in kinds)

    @property
    def largest_linear(self) -> int:
        return max((weight.size for weight in self.weights if weight.kind == "linear"), default=0)


def shape_from(
    name: str, config: Mapping[str, Any], lean: bool, weights: Iterable[Weight] | None = None, stored: str = ""
) -> ModelShape:
    """The shape that a `config.json` tells. Without `weights` they are those of its family. Raises SizesUnknown for a
    configuration that lacks a size, or a family that is not known here."""
    text: Mapping[str, Any] = config.get("text_config") or config

    def size(*keys: str) -> int:
        for key in keys:
            if isinstance(text.get(key), int):
                return int(text[key])
        raise SizesUnknown(f"The configuration of {name} tells no {keys[0]}, so its memory cannot be planned.")

    hidden, heads = size("hidden_size", "n_embd"), size("num_attention_heads", "n_head")
    model_type = str(text.get("model_type") or config.get("model_type"))
    # two models say in their file what others leave to the family's default
    tied = bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", model_type in _TIED_FAMILIES)))
    sizes = {
        "hidden": hidden,
        "layers": size("num_hidden_layers", "n_layer"),
        "heads": heads,
        "kv_heads": int(text.get("num_key_value_heads") or heads),
        "head_dim": int(text.get("head_dim") or hidden // heads),
        "intermediate": int(text.get("intermediate_size") or text.get("n_inner") or 4 * hidden),
        "vocab": size("vocab_size"),
        "context_length": size("max_position_embeddings", "n_positions"),
    }
    if weights is None:
        if model_type not in _FAMILIES:
            raise SizesUnknown(
                f"The sizes of {name} ({model_type}) are told by its weight files only: give its folder, or try again "
                "with a network."
            )
        weights = _FAMILIES[model_type](sizes, bool(text.get("attention_bias")))
        if not tied:
            weights = [*weights, Weight("lm_head.weight", (sizes["vocab"], hidden))]
        if others := config.get("other_parameters"):
            weights = [*weights, Weight("vision_tower", (int(others),))]
    kept = tuple(w for w in weights if not (tied and w.kind == "head") and not _NOT_LOADED.search(w.name))
    stored = stored or str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return ModelShape(
        **sizes,  # type: ignore[arg-type]  # their keys are the fields that are numbers
        name=name,
        model_type=model_type,
        stored=stored,
        tied=tied,
        weights=kept,
        lean=lean,
    )


def read_headers(folder: Path) -> tuple[list[Weight], str]:
    """Name and dimensions of every tensor in a folder's safetensors files, and the dtype of most of their numbers.
    Raises ModelUnavailable for a file that is no safetensors file, or is shorter than its header says."""
    weights: list[Weight] = []
    numbers: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for weight, dtype in _read_header(path):
            weights.append(weight)
            numbers[dtype] = numbers.get(dtype, 0) + weight.size
    return weights, max(numbers, key=numbers.__getitem__, default="float32")


DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
"""How safetensors calls what torch calls otherwise; what is not listed keeps its name."""


def _read_header(path: Path) -> Iterator[tuple[Weight, str]]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: Any = json.loads(file.read(length)) if length < _LONGEST_HEADER else None
        end = (
            8 + length + max((tensor["data_offsets"][1] for key, tensor in header.items() if key[0] != "_"), default=0)
        )
        if path.stat().st_size < end:
            raise ValueError("shorter than its header says")
        for name, tensor in header.items():
            if name != "__metadata__":
                yield Weight(name, tuple(tensor["shape"])), DTYPES.get(tensor["dtype"], tensor["dtype"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
        raise ModelUnavailable(f"{path} is damaged or incomplete: fetch it again.") from None


# -- families ----------------------------------------------------------------------------------------------------------


def _llama(sizes: Mapping[str, int], bias: bool, query_key_norms: bool = False, norms: int = 2) -> list[Weight]:
    hidden, inner = sizes["hidden"], sizes["intermediate"]
    queries, keys = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    weights = [Weight("model.embed_tokens.weight", (sizes["vocab"], hidden)), Weight("model.norm.weight", (hidden,))]
    for index in range(sizes["layers"]):
        layer = f"model.layers.{index}."
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            weights.append(Weight(f"{layer}self_attn.{name}_proj.weight", (outputs, hidden)))
            if bias:
                weights.append(Weight(f"{layer}self_attn.{name}_proj.bias", (outputs,)))
        weights.append(Weight(f"{layer}self_attn.o_proj.weight", (hidden, queries)))
        if query_key_norms:
            weights += [Weight(f"{layer}self_attn.{name}_norm.weight", (sizes["head_dim"],)) for name in "qk"]
        weights += [Weight(f"{layer}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")]
        weights.append(Weight(f"{layer}mlp.down_proj.weight", (hidden, inner)))
        weights += [Weight(f"{layer}norm_{number}.weight", (hidden,)) for number in range(norms)]
    return weights


def _gpt2(sizes: Mapping[str, int], _bias: bool) -> list[Weight]:
    hidden, inner = sizes["hidden"], sizes["intermediate"]
    weights = [
        Weight("transformer.wte.weight", (sizes["vocab"], hidden)),
        Weight("transformer.wpe.weight", (sizes["context_length"], hidden)),
        *(Weight(f"transformer.ln_f.{part}", (hidden,)) for part in ("weight", "bias")),
    ]
    for index in range(sizes["layers"]):
        layer = f"transformer.h.{index}."
        products = (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, inner),
            ("mlp.c_proj", inner, hidden),
        )
        for name, inputs, outputs in products:
            weights += [Weight(f"{layer}{name}.weight", (inputs, outputs)), Weight(f"{layer}{name}.bias", (outputs,))]
        weights += [Weight(f"{layer}ln_{i}.{part}", (hidden,)) for i in (1, 2) for part in ("weight", "bias")]
    return weights


_FAMILIES: Mapping[str, Callable[[Mapping[str, int], bool], list[Weight]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda sizes, _bias: _llama(sizes, bias=True),
    "qwen3": lambda sizes, bias: _llama(sizes, bias, query_key_norms=True),
    "gemma3": lambda sizes, bias: _llama(sizes, bias, query_key_norms=True, norms=4),
    "gemma3_text": lambda sizes, bias: _llama(sizes, bias, query_key_norms=True, norms=4),
    "gpt2": _gpt2,
}
_TIED_FAMILIES = ("gpt2", "gemma3", "gemma3_text")
