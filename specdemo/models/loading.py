"""From a name to models that are ready to run: the target, its draft model if it has one, and their tokenizer.

A name is "embedded", a local folder or a hub id. Weights are safetensors and code from a repository is never run.
Everything that can be known from configuration files is checked before weights are read.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from ..errors import BadRequest, ModelUnavailable
from ..text import TokenText
from .base import LanguageModel
from .embedded import ensure_embedded
from .transformers_lm import TransformersLM

EMBEDDED = "embedded"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_CHOICES = ("auto", *DTYPES)

Progress = Callable[[str, float], None]

_REPOSITORY_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "LICENSE*"]


@dataclass(frozen=True)
class Pair:
    """A target and what goes with it. `draft` is None where drafting needs no model or none is known."""

    target: LanguageModel
    draft: LanguageModel | None
    tokenizer: Any
    text: TokenText
    eos_ids: frozenset[int]
    target_folder: Path
    draft_folder: Path | None = None
    notes: tuple[str, ...] = field(default=())


def load_pair(
    target: str = EMBEDDED,
    draft: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
) -> Pair:
    """Load `target` and, if named, `draft`. Raises ModelUnavailable or BadRequest, each a sentence for the user."""
    report = progress or (lambda text, share: None)
    where = choose_device(device)
    report(f"Finding {target}", 0.0)
    target_folder = find_model(target, lambda text, share: report(text, 0.7 * share))
    tokenizer = load_tokenizer(target_folder, target)
    vocabulary = tokenizer.get_vocab()
    report(f"Loading {target}", 0.7)
    name = "SmolLM2-135M-Instruct" if target == EMBEDDED else target
    target_lm = load_language_model(target_folder, name, dtype, where, vocab_size=max(vocabulary.values()) + 1)
    draft_lm, draft_folder = None, None
    if draft is not None:
        report(f"Loading {draft}", 0.9)
        draft_folder = find_model(draft, progress)
        draft_vocabulary = load_tokenizer(draft_folder, draft).get_vocab()
        check_same_vocabulary(target, vocabulary, draft, draft_vocabulary)
        size = max(draft_vocabulary.values()) + 1
        draft_lm = load_language_model(draft_folder, draft, dtype, where, vocab_size=size)
    notes = ()
    if target == EMBEDDED:
        notes = ("The embedded target is a 4-bit file (Q4_1) widened to 16 bit.",)
    report("Ready", 1.0)
    return Pair(
        target=target_lm,
        draft=draft_lm,
        tokenizer=tokenizer,
        text=TokenText(tokenizer),
        eos_ids=eos_ids(target_folder, tokenizer),
        target_folder=target_folder,
        draft_folder=draft_folder,
        notes=notes,
    )


def choose_device(device: str) -> torch.device:
    """`auto` is the first of CUDA, Apple's MPS and the CPU that is there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise BadRequest(f"The device {device!r} cannot be used ({reason}): try cpu, cuda, mps or auto.") from None
    return chosen


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where a card has it, float16 on other cards, float32 on a processor."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise BadRequest(f"There is no dtype {dtype!r}: choose one of {', '.join(DTYPE_CHOICES)}.")
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.float16 if device.type == "mps" else torch.float32


def find_model(name: str, progress: Progress | None = None) -> Path:
    """The folder of a model's files, fetched first where needed. Raises ModelUnavailable."""
    if name == EMBEDDED:
        return ensure_embedded(progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _checked_folder(folder, name)
    if folder.is_file() or name.endswith(".gguf"):
        raise ModelUnavailable(
            f"{name} is a single file, and a model here is a folder with safetensors weights, configuration and "
            "tokenizer: convert it first."
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelUnavailable(f"There is no folder {name}: check the path, or give a hub id such as owner/model.")
    try:
        downloaded = snapshot_download(name, allow_patterns=_REPOSITORY_FILES)
    except GatedRepoError:
        raise ModelUnavailable(
            f"{name} is gated: accept its licence on its hub page, then log in with `hf auth login` or set HF_TOKEN."
        ) from None
    except RepositoryNotFoundError:
        raise ModelUnavailable(f"The hub has no model {name}, or it is private: check the name, or log in.") from None
    except HFValidationError:
        raise ModelUnavailable(f"{name!r} is neither a folder nor a hub id of the form owner/model.") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError, TimeoutError):
        raise ModelUnavailable(
            f"{name} is not in the cache and the hub cannot be reached: check the network and try again, or give a "
            "local folder."
        ) from None
    except OSError as error:
        advice = "free some space" if error.errno == errno.ENOSPC else "check the cache folder"
        raise ModelUnavailable(f"{name} could not be stored ({error.strerror or error}): {advice}.") from None
    return _checked_folder(Path(downloaded), name)


def _checked_folder(folder: Path, name: str) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelUnavailable(f"{name} has no config.json, so it is not a model folder: check the path.")
    if not any(folder.glob("*.safetensors")):
        raise ModelUnavailable(f"{name} has no safetensors weights, the only kind that is read here: convert it first.")
    return folder


def load_tokenizer(folder: Path, name: str) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ModelUnavailable(f"The tokenizer of {name} cannot be loaded ({_first_line(error)}).") from None
    if len(tokenizer) == 0:
        raise ModelUnavailable(f"{name} has no tokenizer files: add them to its folder.")
    return tokenizer


def load_language_model(folder: Path, name: str, dtype: str, device: torch.device, vocab_size: int) -> LanguageModel:
    """Weights onto the device, behind the fastest forward that knows the architecture."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ModelUnavailable(f"The configuration of {name} cannot be read ({_first_line(error)}).") from None
    if config.is_encoder_decoder:
        raise ModelUnavailable(f"{name} is an encoder-decoder model; only causal language models decode here.")
    precision = choose_dtype(dtype, device)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=precision, use_safetensors=True, trust_remote_code=False
        ).eval()
        model = model.to(device)
    except torch.cuda.OutOfMemoryError:
        raise ModelUnavailable(f"{name} does not fit into the memory of {device}: choose a smaller model.") from None
    except Exception as error:
        raise ModelUnavailable(f"{name} cannot be loaded ({_first_line(error)}).") from None
    context = int(getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None) or 2048)
    size = min(vocab_size, int(config.vocab_size))
    return TransformersLM(model, name, str(precision).removeprefix("torch."), size, context)


def check_same_vocabulary(target: str, ours: dict[str, int], draft: str, theirs: dict[str, int]) -> None:
    """A draft model speaks the target's ids: every token they share has one id, and they share nearly all."""
    shared = ours.keys() & theirs.keys()
    differing = sum(ours[token] != theirs[token] for token in shared)
    if differing or len(shared) < 0.9 * len(ours):
        raise ModelUnavailable(
            f"{draft} cannot draft for {target}: their tokenizers differ, so the same ids mean other texts. Choose a "
            "draft model of the target's family, or the method prompt-lookup, which needs none."
        )


def eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: all of the generation config's, and the tokenizer's own."""
    ids: set[int] = set()
    if (folder / "generation_config.json").is_file():
        listed = GenerationConfig.from_pretrained(folder).eos_token_id
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
