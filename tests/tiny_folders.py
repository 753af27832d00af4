"""Tiny models as folders, in the layout of the hub: what the command line is given instead of a real model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


def save_folder(model: LlamaForCausalLM, folder: Path) -> Path:
    """Weights, configuration, and a byte-level tokenizer of printable ASCII, space and newline in 96 ids."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["<pad>", "<s>", "</s>", "Ġ", "Ċ", *map(chr, range(0x21, 0x7C))]
    assert len(tokens) == model.config.vocab_size
    backend = Tokenizer(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
