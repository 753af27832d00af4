"""From a name to models that are ready to run: the target, its draft model if it has one, and their tokenizer.

A name is "embedded", a local folder or a hub id. Weights are safetensors and code from a repository is never run.
Everything that can be known from configuration files is checked before weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers.utils import logging as transformers_logging

from ..errors import BadRequest, ModelUnavailable, SpecdemoError
from ..text import TokenText
from .base import LanguageModel
from .embedded import ensure_embedded
from .hub import checked_folder, fetch, needs_code
from .lean import LeanLM
from .linear import PRECISIONS, best_cpu_precision, precision_obstacle
from .memory import ran_out_of_memory
from .names import AUTO, EMBEDDED, EMBEDDED_NAME, NONE, draft_precision
from .pretrained import read_config, read_tokenizer, transformers_config
from .quantize import load_quantized
from .reduced_vocab import SHIPPED, is_draft_folder, load_draft
from .transformers_lm import TransformersLM
from .vocabulary import check_same_vocabulary

if TYPE_CHECKING:
    from ..plan.choose import Plan

WIDENED = "The embedded target is a 4-bit file (Q4_1) widened to 16 bit."
DTYPE_CHOICES = ("auto", *PRECISIONS)

Progress = Callable[[str, float], None]

EMBEDDING = "model.embed_tokens.weight"
"""Its name in every family that the lean forward knows."""


@dataclass(frozen=True, slots=True)
class Keep:
    """How one model is kept: `dtype` as `--dtype`, `quantize` "none" or a kind of `quantize.KINDS`, whose other weights
    are then in `dtype`. `room`: bytes of weights by device, for accelerate, where one device is not enough."""

    dtype: str = AUTO
    quantize: str = NONE
    room: Mapping[int | str, int] | None = None


class Smaller(Protocol):
    """A plan below a pair's own, ready to be loaded."""

    @property
    def plan(self) -> Plan: ...

    def load(self, progress: Progress | None = None) -> Pair: ...


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
    plan: Plan | None = None
    smaller: Smaller | None = None  # what to load instead where this pair runs out of memory


def load_pair(
    target: str = EMBEDDED,
    draft: str = AUTO,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    keep: Keep | None = None,
    keep_draft: Keep | None = None,
    draft_device: str | None = None,
) -> Pair:
    """Load `target` and its draft model. `draft` is "auto" (the one that comes with the embedded target, if this is
    it), "none", a draft distilled for this target, or any model with the target's tokenizer. `keep` and `keep_draft`
    say how each is kept, where that is more than a dtype for both. draft_device: None for the target's. Raises
    ModelUnavailable or BadRequest, each a sentence for the user."""
    report = progress or (lambda text, share: None)
    where = choose_device(device)
    draft_where = choose_device(draft_device) if draft_device else where
    report(f"Finding {target}", 0.0)
    target_folder = find_model(target, partial(_part, report, 0.0, 0.5))
    tokenizer = load_tokenizer(target_folder, target)
    vocabulary, size = tokenizer.get_vocab(), 0
    draft_folder = None
    if draft == AUTO and target == EMBEDDED and is_draft_folder(SHIPPED):
        draft_folder = SHIPPED
    elif draft not in (AUTO, NONE):
        report(f"Finding {draft}", 0.5)
        local = Path(draft).expanduser()
        draft_folder = local if is_draft_folder(local) else find_model(draft, partial(_part, report, 0.5, 0.7))
    if draft_folder is not None and not is_draft_folder(draft_folder):
        draft_vocabulary = load_tokenizer(draft_folder, draft).get_vocab()
        check_same_vocabulary(target, vocabulary, draft, draft_vocabulary)
        size = max(draft_vocabulary.values()) + 1
    report(f"Loading {target}", 0.7)
    name = EMBEDDED_NAME if target == EMBEDDED else target
    keep = keep or Keep(dtype)
    target_lm = load_language_model(target_folder, name, keep, where, vocab_size=max(vocabulary.values()) + 1)
    draft_lm = None
    if draft_folder is not None:
        report("Loading the draft model", 0.9)
        if is_draft_folder(draft_folder):
            draft_lm = _load_distilled(draft_folder, target_lm, draft_where)
        else:
            draft_lm = load_language_model(draft_folder, draft, keep_draft or Keep(dtype), draft_where, vocab_size=size)
    report("Ready", 1.0)
    return Pair(
        target=target_lm,
        draft=draft_lm,
        tokenizer=tokenizer,
        text=TokenText(tokenizer),
        eos_ids=eos_ids(target_folder, tokenizer),
        target_folder=target_folder,
        draft_folder=draft_folder,
        notes=(WIDENED,) if target == EMBEDDED else (),
    )


def _part(report: Progress, start: float, end: float, text: str, share: float) -> None:
    """One stage's progress, which is the stretch from `start` to `end` of the whole."""
    report(text, start + (end - start) * share)


def _load_distilled(folder: Path, target: LanguageModel, device: torch.device) -> LanguageModel:
    """A draft that reads the target's embeddings, or on another device a copy of them, in the target's precision, or
    where that is not one of the lean forward's, in what the device is fast at, or less (`draft_precision`)."""
    if isinstance(target, LeanLM | TransformersLM):
        precision = target.precision if isinstance(target, LeanLM) else choose_precision(AUTO, device)
        kept = draft_precision(precision, device.type)
        return load_draft(folder, target.embedding.to(device), kept, vocab_size=target.vocab_size)
    raise ModelUnavailable(
        f"A distilled draft reads its target's embeddings, which {target.name} does not share when it runs by "
        f"{target.forward_path}: choose another draft model, or the method prompt-lookup."
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


def choose_precision(dtype: str, device: torch.device) -> str:
    """`auto`: bfloat16 where a card or processor computes in it, else float16, else float32. Raises BadRequest."""
    if dtype not in DTYPE_CHOICES:
        raise BadRequest(f"There is no dtype {dtype!r}: choose one of {', '.join(DTYPE_CHOICES)}.")
    if dtype != "auto":
        return dtype
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "float16" if device.type == "mps" else best_cpu_precision()


def find_model(name: str, progress: Progress | None = None) -> Path:
    """The folder of a model's files, fetched first where needed. Raises ModelUnavailable."""
    if name == EMBEDDED:
        return ensure_embedded(progress)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return checked_folder(folder, name)
    if folder.is_file() or name.endswith(".gguf"):
        raise ModelUnavailable(
            f"{name} is a single file, and a model here is a folder with safetensors weights, configuration and "
            "tokenizer: convert it first."
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelUnavailable(f"There is no folder {name}: check the path, or give a hub id such as owner/model.")
    return checked_folder(fetch(name, progress), name)


def load_tokenizer(folder: Path, name: str) -> Any:
    try:
        tokenizer = read_tokenizer(folder)
    except Exception as error:
        raise ModelUnavailable(f"The tokenizer of {name} cannot be loaded ({_first_line(error)}).") from None
    if len(tokenizer) == 0:
        raise ModelUnavailable(f"{name} has no tokenizer files: add them to its folder.")
    return tokenizer


def load_language_model(folder: Path, name: str, keep: Keep, device: torch.device, vocab_size: int) -> LanguageModel:
    """Weights onto the device, behind the lean forward where it knows the architecture, else transformers' own."""
    try:
        config = read_config(folder)
    except Exception as error:
        if needs_code(folder):
            raise ModelUnavailable(
                f"{name} needs code from its repository, which is never run here: choose a model that transformers "
                "knows."
            ) from None
        raise ModelUnavailable(f"The configuration of {name} cannot be read ({_first_line(error)}).") from None
    if config.is_encoder_decoder:
        raise ModelUnavailable(f"{name} is an encoder-decoder model; only causal language models decode here.")
    precision = choose_precision(keep.dtype, device)
    spread = _spread(folder, device, keep)
    obstacle = LeanLM.supports(config) or precision_obstacle(precision, device) or spread
    try:
        if keep.quantize != NONE:
            whole = transformers_config(folder)
            return load_quantized(folder, whole, name, keep.quantize, keep.dtype, device, vocab_size, keep.room)
        if obstacle is None:
            return LeanLM(config, _read_weights(folder, device), name, precision, vocab_size)
        whole = transformers_config(folder)
        return _load_with_transformers(folder, whole, name, keep, device, vocab_size, obstacle, spread is not None)
    except SpecdemoError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise ModelUnavailable(
                f"{name} does not fit into the memory of {device}: choose a smaller model."
            ) from None
        raise ModelUnavailable(f"{name} cannot be loaded ({_first_line(error)}).") from None


def _read_weights(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Every tensor of the folder's safetensors files, memory-mapped on the CPU, and on a card by torch's own way there:
    on ZeroGPU that card is emulated, which only torch knows. Embeddings are used as they are, and a single tensor keeps
    its whole file mapped: on the CPU they are copied, so that the file is let go once all is packed."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        weights.update((name, tensor.to(device)) for name, tensor in load_file(path).items())
    if device.type == "cpu" and EMBEDDING in weights:
        weights[EMBEDDING] = weights[EMBEDDING].clone()
    return weights


def _spread(folder: Path, device: torch.device, keep: Keep) -> str | None:
    """Why one CUDA card is not enough for the weights, or None. Then accelerate places the layers."""
    if keep.room is not None:
        return "its layers spread over several devices by accelerate"
    if device.type != "cuda":
        return None
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free, _total = torch.cuda.mem_get_info(device)
    return None if size < 0.9 * free else "larger than one card, its layers spread by accelerate"


def _load_with_transformers(
    folder: Path, config: Any, name: str, keep: Keep, device: torch.device, vocab_size: int, reason: str, spread: bool
) -> LanguageModel:
    """By transformers' forward, on `device`, or `spread` over all that there are."""
    dtype = keep.dtype
    if dtype == "int8":
        raise BadRequest(f"int8 runs in the lean forward only, and {name} cannot use it: {reason}.")
    precision = "float32" if dtype == "auto" and device.type == "cpu" else choose_precision(dtype, device)
    from transformers import AutoModelForCausalLM  # seconds of imports that the lean forward does not need

    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=getattr(torch, precision),
        device_map=None if device.type != "cuda" else "auto" if spread else {"": device},
        max_memory=keep.room,
        use_safetensors=True,
        trust_remote_code=False,
    ).eval()
    if device.type != "cuda":
        model = model.to(device)
    elif offloaded := sorted(str(part) for part in model.hf_device_map.values() if part in ("cpu", "disk")):
        reason += f"; {len(offloaded)} parts are offloaded from the card, which makes every forward slow"
    text = config.get_text_config()
    context = int(getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2048)
    return TransformersLM(model, name, precision, min(vocab_size, int(text.vocab_size)), context, reason)


def eos_ids(folder: Path, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: all of the generation config's, and the tokenizer's own."""
    ids: set[int] = set()
    if (path := folder / "generation_config.json").is_file():
        listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return frozenset(ids)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
