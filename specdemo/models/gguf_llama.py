"""From a GGUF file of a Llama model to a folder that transformers loads: weights, tokenizer and configurations.

Every weight is dequantized to float32, as the file defines it, and stored in float16, which keeps more of it than
bfloat16: a 4-bit weight is `scale * code + minimum` with float16 scale and minimum, so it needs float16's eleven bits
of mantissa far more often than bfloat16's range (relative error of SmolLM2-135M-Instruct's Q4_1 file: 0.00019 against
0.0013). A weight that float16 cannot hold is refused. The number of bits widened to says nothing about quality: that
stays the file's.

The configuration names bfloat16 as the type to compute in, the one such models are trained in.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, TokenType
from gguf.quants import dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

_TOP_WEIGHTS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_WEIGHTS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert(gguf_file: Path, folder: Path, progress: Callable[[float], None] | None = None) -> None:
    """Write config.json, generation_config.json, tokenizer.json, tokenizer_config.json, chat_template.jinja and
    model.safetensors (float16) into the existing `folder`.

    `progress` hears the share of the tensors that are done, 0 to 1. Raises ValueError for a file that is not a Llama
    model with a byte-level tokenizer of the kinds known here, or that holds weights float16 cannot.
    """
    reader = GGUFReader(str(gguf_file))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        raise ValueError(f"architecture {fields.get('general.architecture')!r} is not llama")
    _write_tokenizer(fields, folder)
    weights = _weights(reader, fields, progress or (lambda share: None))
    _write_json(folder / "config.json", _config(fields, tied="lm_head.weight" not in weights))
    _write_json(folder / "generation_config.json", _generation_config(fields))
    # The metadata says which framework's layout the names follow; transformers refuses a file without it.
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weights(
    reader: GGUFReader, fields: dict[str, Any], progress: Callable[[float], None]
) -> dict[str, NDArray[np.float16]]:
    heads = fields["llama.attention.head_count"]
    kv_heads = fields["llama.attention.head_count_kv"]
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        progress(done / len(reader.tensors))
        weight: NDArray[np.float32] = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("attn_q.weight"):
            weight = _to_half_rotary(weight, heads)
        elif tensor.name.endswith("attn_k.weight"):
            weight = _to_half_rotary(weight, kv_heads)
        with np.errstate(over="ignore"):
            half = weight.astype(np.float16)
        if not np.isfinite(half).all():
            raise ValueError(f"{tensor.name} holds values that float16 cannot")
        weights[_name(tensor.name)] = np.ascontiguousarray(half)
    progress(1.0)
    return weights


def _name(gguf_name: str) -> str:
    if gguf_name in _TOP_WEIGHTS:
        return _TOP_WEIGHTS[gguf_name]
    block, _, rest = gguf_name.removeprefix("blk.").partition(".")
    if not block.isdigit() or rest not in _LAYER_WEIGHTS:
        raise ValueError(f"unknown weight {gguf_name}")
    return f"model.layers.{block}.{_LAYER_WEIGHTS[rest]}"


def _to_half_rotary(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the rows of a query or key projection [heads * head_dim, hidden].

    GGUF keeps the two numbers that a rotary embedding turns next to each other (rows 2i and 2i + 1 of a head);
    transformers keeps them half a head apart (rows i and i + head_dim / 2).
    """
    rows, hidden = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, hidden)  # [heads, head_dim / 2, 2, hidden]
    halves: NDArray[np.float32] = pairs.swapaxes(1, 2).reshape(rows, hidden)
    return halves


def _config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = fields["llama.attention.head_count"]
    hidden = fields["llama.embedding_length"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": hidden,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields.get("llama.rope.dimension_count", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        # The file holds a float32; its shortest decimal form is the number that was meant (1e-05).
        "rms_norm_eps": float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.get("llama.rope.freq_base", 10000.0)},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
    }
    return config | _special_ids(fields)


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    """Greedy unless asked otherwise, and every id that ends a text.

    The file names one such id, the end of a chat turn; a raw completion can also end with the token that separated
    the documents of the training text.
    """
    ids = _special_ids(fields)
    ends = [ids["eos_token_id"]]
    tokens = fields["tokenizer.ggml.tokens"]
    if "<|endoftext|>" in tokens and tokens.index("<|endoftext|>") not in ends:
        ends.append(tokens.index("<|endoftext|>"))
    return ids | {"do_sample": False, "eos_token_id": ends}


def _special_ids(fields: dict[str, Any]) -> dict[str, Any]:
    eos = fields["tokenizer.ggml.eos_token_id"]
    return {
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos,
        "pad_token_id": fields.get("tokenizer.ggml.padding_token_id", eos),
    }


def _pre_tokenizer(kind: str) -> PreTokenizer:
    """How text is cut before merging; the file only names it. With a wrong one every text still decodes to itself,
    but numbers become tokens that the model has hardly ever seen."""
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    if kind == "smollm":
        return Sequence([Digits(individual_digits=True), byte_level])
    if kind == "gpt-2":
        return byte_level
    raise ValueError(f"unknown pre-tokenizer {kind!r}")


def _write_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ValueError(f"tokenizer {fields.get('tokenizer.ggml.model')!r} is not byte-level BPE")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(fields["tokenizer.ggml.pre"])
    tokenizer.decoder = ByteLevelDecoder()
    kinds = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))

    def text_of(key: str) -> str | None:
        id = fields.get(f"tokenizer.ggml.{key}_token_id")
        return None if id is None else tokens[id]

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "bos_token": text_of("bos"),
        "eos_token": text_of("eos"),
        "pad_token": text_of("padding") or text_of("eos"),
        "unk_token": text_of("unknown"),
        "additional_special_tokens": special,
    }
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in config.items() if value is not None})
    template = fields.get("tokenizer.chat_template")
    if template:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8", newline="\n")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
