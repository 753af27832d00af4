"""A trained draft as files: the small one that the package reads, and a plain Llama folder that anything reads.

The plain folder is the same draft with a whole vocabulary: the target's embeddings to read, the draft's offsets added,
and a head as large, in which the ids outside the reduced vocabulary have a row that scores them far below all others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..models.reduced_vocab import DraftConfig, read_draft, write_draft
from .data import Batch
from .student import Layer, Student, target_parts

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def layer_tensors(student: Student) -> dict[str, Tensor]:
    """The draft's layers and final norm under transformers' parameter names."""
    shape = student.shape
    inner, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    tensors: dict[str, Tensor] = {"model.norm.weight": student.norm.detach()}
    for index, layer in enumerate(student.layers):
        assert isinstance(layer, Layer)
        prefix = f"model.layers.{index}."
        q, k, v = layer.qkv.detach().split([inner, kv, kv])
        gate, up = layer.gate_up.detach().chunk(2)
        parts = {
            "input_layernorm": layer.attention_norm.detach(),
            "self_attn.q_proj": q,
            "self_attn.k_proj": k,
            "self_attn.v_proj": v,
            "self_attn.o_proj": layer.output.detach(),
            "post_attention_layernorm": layer.mlp_norm.detach(),
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": layer.down.detach(),
        }
        tensors |= {f"{prefix}{name}.weight": tensor for name, tensor in parts.items()}
    return tensors


def export_draft(
    student: Student, folder: Path, target: str, context_length: int, texts: Sequence[Sequence[int]], license: str = ""
) -> DraftConfig:
    """Write the draft's own format (`models.reduced_vocab`); the folder then loads with `load_draft`.

    texts: some token ids as the draft will see them, to find the states that `floor_row` is for.
    """
    shape = student.shape
    config = DraftConfig(
        target=target,
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_theta=shape.rope_theta,
        rms_norm_eps=shape.norm_eps,
        max_position_embeddings=context_length,
        draft_vocab_size=len(student.vocab_ids),
        target_vocab_size=len(student.embeddings),
        license=license,
    )
    floor = floor_row(torch.cat([_states(student, text) for text in texts]))
    offsets = student.offsets.detach()
    write_draft(
        folder, config, layer_tensors(student), student.vocab_ids.cpu(), offsets, floor, student.embeddings.cpu()
    )
    return config


def export_plain(draft: Path, target: Path, folder: Path) -> None:
    """Write the draft in folder `draft` as a plain Llama folder (float16) with the tokenizer of the folder `target`."""
    stored = read_draft(draft)
    config, layers = stored.config, stored.layers
    embeddings = target_parts(target).embeddings
    head = stored.floor.expand(len(embeddings), -1).clone()
    head[stored.vocab_ids] = embeddings[stored.vocab_ids]
    embeddings[stored.vocab_ids] += stored.offsets
    tensors = {**layers, "model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.to(torch.float16).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    described = config.llama().to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "float16"}
    source = json.loads((target / "config.json").read_text(encoding="utf-8"))
    described |= {name: source[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in source}
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, folder / name)


@torch.no_grad()
def _states(student: Student, text: Sequence[int]) -> Tensor:
    """The draft's final states [T, hidden] at every position of a text, on the CPU."""
    ids, rows = torch.tensor([list(text)]), torch.arange(len(text))
    batch = Batch(ids, rows, torch.zeros(len(text), 4, dtype=torch.long), torch.zeros(len(text), 4), len(text))
    states: Tensor = student.final_states(batch.to(student.norm.device)).cpu()
    return states


def floor_row(states: Tensor, depth: float = 60.0) -> Tensor:
    """A head row [hidden] whose product with every state is near -depth: least squares over states [S, hidden]."""
    wanted = torch.full((len(states), 1), -depth, dtype=torch.float64)
    ridge = 1e-3 * torch.eye(states.shape[1], dtype=torch.float64)
    gram = states.double().T @ states.double()
    row: Tensor = torch.linalg.solve(gram + ridge * gram.diagonal().mean(), states.double().T @ wanted)
    return row.squeeze(1).float()
