"""A distilled draft: its own small layers, the target's embeddings, and a head over the ids it proposes.

Most of a small model's weights are its embedding table and its head. A draft reads the target's embeddings, which are
in memory anyway, and scores a reduced vocabulary with some rows of the same table, so only its layers are stored, and
what it adds to the embeddings of that vocabulary: 8-bit, one scale per row. It is an ordinary Llama otherwise, with a
cache of its own, and runs on the lean forward.
Outside the reduced vocabulary q is 0; `vocab_ids` tells which of the target's ids each column of its logits is.

A draft's folder holds `config.json` and `draft.safetensors` (see `write_draft`), and a model card for people.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..errors import ModelUnavailable
from .base import LanguageModel
from .lean import LeanLM
from .pretrained import explicit_llama

SHIPPED = Path(__file__).parent.parent / "weights"
"""The draft for the embedded target that comes with the package."""

CONFIG, WEIGHTS = "config.json", "draft.safetensors"

_FORMAT = "specdemo-draft-1"
_SCALE, _OFFSETS = ".scale", "offsets"
_CHECKED_ROWS = 16
_TOLERANCE = 0.02  # 16-bit roundings of one target differ by less, two targets by more


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Sizes of the draft, a Llama, and where it belongs. `target` is the target's name, for people and messages."""

    target: str
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    draft_vocab_size: int
    target_vocab_size: int
    license: str = ""

    def explicit(self) -> Any:
        """The same as `llama` for the lean forward, without transformers' class, whose import takes seconds."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        told = {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False, "rope_parameters": rope}
        return explicit_llama(told | {"vocab_size": self.target_vocab_size} | asdict(self))

    def llama(self) -> Any:
        """The transformers configuration of the same sizes, with the target's whole vocabulary."""
        from transformers import LlamaConfig

        return LlamaConfig(
            vocab_size=self.target_vocab_size,
            num_hidden_layers=self.num_hidden_layers,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta},
            tie_word_embeddings=False,
        )


def is_draft_folder(folder: Path) -> bool:
    """Whether `folder` holds a draft of this format (and not a model that stands on its own)."""
    try:
        format = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["format"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return bool(format == _FORMAT)


@dataclass(frozen=True, slots=True)
class StoredDraft:
    """What a draft's folder holds.

    layers: transformers' parameter names -> float32 tensors, without embedding and head. vocab_ids: int64
    [draft_vocab_size], ascending. offsets: [draft_vocab_size, hidden], added to these ids' embeddings; zero in a file
    that has none. floor: [hidden], a head row whose score lies far below those of the vocabulary, for a head over all
    ids. target_rows: some rows of the target's embeddings, to tell another target's from them.
    """

    config: DraftConfig
    layers: dict[str, Tensor]
    vocab_ids: Tensor
    offsets: Tensor
    floor: Tensor
    target_rows: Tensor


def write_draft(
    folder: Path,
    config: DraftConfig,
    layers: Mapping[str, Tensor],
    vocab_ids: Tensor,
    offsets: Tensor,
    floor: Tensor,
    embeddings: Tensor,
) -> None:
    """Write a draft's two files; see `StoredDraft`. embeddings: the target's, [target_vocab_size, hidden]."""
    stored: dict[str, Tensor] = {"vocab_ids": vocab_ids.to(torch.int32), "floor": floor.float()}
    for name, tensor in {**layers, _OFFSETS: offsets}.items():
        stored |= _quantize(name, tensor)
    stored["target_rows"] = embeddings[_checked_ids(len(embeddings))].to(torch.float16)
    data = save({name: tensor.cpu().contiguous() for name, tensor in stored.items()}, {"format": "pt"})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_bytes(data)
    described = {"format": _FORMAT, "sha256": hashlib.sha256(data).hexdigest(), **asdict(config)}
    (folder / CONFIG).write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")


def read_draft(folder: Path) -> StoredDraft:
    """Read a draft's folder and check it against its hash. Raises ModelUnavailable."""
    broken = ModelUnavailable(f"The draft model in {folder} is damaged or incomplete: fetch or distil it again.")
    try:
        described = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        data = (folder / WEIGHTS).read_bytes()
        expected = described.pop("sha256")
        if described.pop("format") != _FORMAT or hashlib.sha256(data).hexdigest() != expected:
            raise broken
        config = DraftConfig(**described)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise broken from error
    stored = load(data)
    vocab_ids, floor, rows = (stored.pop(name) for name in ("vocab_ids", "floor", "target_rows"))
    layers = {name: _widen(name, stored) for name in stored if not name.endswith(_SCALE)}
    none = torch.zeros(len(vocab_ids), config.hidden_size)
    return StoredDraft(config, layers, vocab_ids.long(), layers.pop(_OFFSETS, none), floor, rows.float())


def load_draft(
    folder: Path, embeddings: Tensor, precision: str = "float32", name: str | None = None, vocab_size: int | None = None
) -> LanguageModel:
    """The draft in `folder`, on the device of its target's `embeddings` ([vocab, hidden], any float dtype, shared).

    precision: as `LeanLM` takes. vocab_size: ids that the target can emit, where fewer than its embeddings; ids of the
    draft beyond them are dropped. Raises ModelUnavailable, also where the embeddings are another target's.
    """
    stored = read_draft(folder)
    config, vocab_ids, offsets = stored.config, stored.vocab_ids, stored.offsets
    ids = _checked_ids(config.target_vocab_size)
    if embeddings.shape != (config.target_vocab_size, config.hidden_size) or not torch.allclose(
        embeddings[ids.to(embeddings.device)].float().cpu(),
        stored.target_rows,
        atol=_TOLERANCE,
        rtol=_TOLERANCE,
    ):
        raise ModelUnavailable(
            f"The draft model in {folder} was made for {config.target} and cannot serve another target: distil one "
            "for this target, or choose the method prompt-lookup, which needs none."
        )
    if vocab_size is not None:
        offsets, vocab_ids = offsets[vocab_ids < vocab_size], vocab_ids[vocab_ids < vocab_size]
    device = embeddings.device
    offsets, vocab_ids = offsets.to(device), vocab_ids.to(device)
    state = {key: tensor.to(device) for key, tensor in stored.layers.items()}
    state["model.embed_tokens.weight"] = embeddings
    state["lm_head.weight"] = embeddings[vocab_ids].float()
    title = name or f"{config.target.rsplit('/', 1)[-1]} draft"
    return LeanLM(config.explicit(), state, title, precision, vocab_ids=vocab_ids, embedding_offsets=offsets)


def _checked_ids(vocab_size: int) -> Tensor:
    return torch.linspace(0, vocab_size - 1, min(_CHECKED_ROWS, vocab_size)).long()


def _quantize(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A matrix as int8 with one float32 scale per row; a vector (a norm's gain) as it is."""
    if tensor.dim() < 2:
        return {name: tensor.float()}
    scale = (tensor.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    return {name: (tensor.float() / scale).round().to(torch.int8), name + _SCALE: scale}


def _widen(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    scale = stored.get(name + _SCALE)
    return stored[name].float() if scale is None else stored[name].float() * scale
