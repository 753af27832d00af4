"""How a method of this project is had in other programs: transformers, vLLM, llama.cpp. Data, filled in for a run.

Names of options are those of transformers 5, vLLM's `--speculative-config`, and llama.cpp's server since it asks for
`--spec-type`. A program that has no such method has no line.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from .compared import Usage
from .models.loading import Pair
from .models.names import EMBEDDED_NAME
from .models.reduced_vocab import is_draft_folder
from .settings import Settings

HUB_NAMES = {EMBEDDED_NAME: "HuggingFaceTB/SmolLM2-135M-Instruct"}
"""Where the original of a model lies that is known here by another name."""

STAND_IN = "DRAFT_MODEL"
"""Stands for a draft model of the reader's choice where ours has a form that other programs do not read."""

NGRAM = 3
"""Length of the n-gram that is looked up, in the programs that ask for it."""


_TRANSFORMERS = """\
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({target!r})
model = AutoModelForCausalLM.from_pretrained({target!r})
chat = [{{"role": "user", "content": "..."}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
"""

_ASSISTED = """\
draft = AutoModelForCausalLM.from_pretrained({draft!r})
draft.generation_config.num_assistant_tokens = {draft_length}
draft.generation_config.num_assistant_tokens_schedule = "constant"
output = model.generate(**inputs, assistant_model=draft, {generation})
"""

_LOOKUP = "output = model.generate(**inputs, prompt_lookup_num_tokens={draft_length}, {generation})\n"

_PLAIN = "output = model.generate(**inputs, {generation})\n"

_VLLM = "vllm serve {target_word}"
_LLAMA = "llama-server -m {file}.gguf"
_LLAMA_DRAFT = " --spec-draft-model {draft_file}.gguf --spec-draft-n-max {draft_length}"
_LLAMA_NGRAM = " --spec-ngram-simple-size-n {ngram} --spec-ngram-simple-size-m {draft_length}"

_DRAFTED: Mapping[str, str] = {
    "transformers": _TRANSFORMERS + _ASSISTED,
    "vLLM": _VLLM + " --speculative-config {vllm_draft}",
    "llama.cpp": _LLAMA + " --spec-type draft-simple" + _LLAMA_DRAFT,
}
_PLAINLY: Mapping[str, str] = {
    "transformers": _TRANSFORMERS + _PLAIN,
    "vLLM": _VLLM,
    "llama.cpp": _LLAMA,
}

USAGES: Mapping[str, Mapping[str, str]] = {
    "standard": _PLAINLY,
    "hf": _PLAINLY,
    "speculative": _DRAFTED,
    "hf-assisted": _DRAFTED,
    "prompt-lookup": {
        "transformers": _TRANSFORMERS + _LOOKUP,
        "vLLM": _VLLM + " --speculative-config {vllm_ngram}",
        "llama.cpp": _LLAMA + " --spec-type ngram-simple" + _LLAMA_NGRAM,
    },
    "hybrid": {"llama.cpp": _LLAMA + " --spec-type ngram-simple,draft-simple" + _LLAMA_NGRAM + _LLAMA_DRAFT},
    "ssd": {},
}
"""Method -> program -> template. Our own command line has them all, and is added by `usages`."""


def usages(method: str, pair: Pair, settings: Settings) -> tuple[Usage, ...]:
    """The lines for a method with the models of `pair`, our own command first where the method is ours."""
    target, draft = _public_name(pair.target.name), _public_draft(pair)
    k = max(1, settings.draft_length)
    drafted = {"model": draft, "num_speculative_tokens": k, "method": "draft_model"}
    looked_up = {"method": "ngram", "num_speculative_tokens": k, "prompt_lookup_max": NGRAM}
    blanks = {
        "target": target,
        "target_word": shlex.quote(target),
        "draft": draft,
        "file": shlex.quote(target.rsplit("/", 1)[-1]),
        "draft_file": shlex.quote(draft.rsplit("/", 1)[-1]),
        "draft_length": k,
        "ngram": NGRAM,
        "generation": _generation(settings),
        "vllm_draft": shlex.quote(json.dumps(drafted)),
        "vllm_ngram": shlex.quote(json.dumps(looked_up)),
    }
    lines = [Usage("specdemo", _own(method, pair, settings))] if not method.startswith("hf") else []
    for program, template in USAGES[method].items():
        needs_draft = "{draft" in template.replace("{draft_length}", "") or "{vllm_draft}" in template
        code = template.format(**blanks).rstrip("\n")
        lines.append(Usage(program, code, own_draft=needs_draft and draft == STAND_IN))
    return tuple(lines)


def _own(method: str, pair: Pair, settings: Settings) -> str:
    words = ["python", "-m", "specdemo", "generate", "--prompt", "-", "--method", method]
    if pair.target.name != EMBEDDED_NAME:
        words += ["--target", _public_name(pair.target.name)]
        if pair.draft is not None:
            words += ["--draft", _public_name(pair.draft.name)]
    if method != "standard":
        words += ["--draft-length", str(settings.draft_length)]
    if method == "ssd":
        words += ["--fan-out", settings.fan_out, "--fan-out-budget", str(settings.fan_out_budget)]
        words += ["--saguaro", f"{settings.saguaro:g}", "--fallback", settings.fallback]
    words += ["--max-new-tokens", str(settings.max_new_tokens), "--temperature", f"{settings.temperature:g}"]
    return shlex.join(words)


def _generation(settings: Settings) -> str:
    """The settings as arguments of transformers' `generate`."""
    sampling = "do_sample=False" if settings.greedy else f"do_sample=True, temperature={settings.temperature:g}"
    if not settings.greedy and settings.top_p < 1.0:
        sampling += f", top_p={settings.top_p:g}"
    return f"max_new_tokens={settings.max_new_tokens}, {sampling}"


def _public_draft(pair: Pair) -> str:
    own_form = pair.draft is None or (pair.draft_folder is not None and is_draft_folder(pair.draft_folder))
    return STAND_IN if own_form or pair.draft is None else _public_name(pair.draft.name)


def _public_name(name: str) -> str:
    """A model's name on the hub, or its folder's name without the folders above it."""
    if name in HUB_NAMES:
        return HUB_NAMES[name]
    return Path(name).expanduser().name if name.startswith(("/", ".", "~")) or Path(name).is_dir() else name
