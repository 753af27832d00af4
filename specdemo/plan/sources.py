"""Whose sizes: of a named pair, a folder, a model on the hub, the distilled draft. No weight is ever fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import get_safetensors_metadata, hf_hub_download, snapshot_download
from huggingface_hub.errors import NotASafetensorsRepoError

from ..errors import ModelUnavailable, SpecdemoError
from ..models.cache_folder import cache_folder
from ..models.hub import checked_folder, hub_errors
from ..models.names import EMBEDDED, EMBEDDED_NAME, FAMILIES
from ..presets import EMBEDDED_MODEL, known_configs
from .shape import DTYPES, ModelShape, Weight, read_headers, shape_from

WIDENED_TO = "float16"
"""What the embedded model's 4-bit file is widened to."""


def shape_of(name: str, ask_hub: bool = True) -> ModelShape:
    """The shape of the model that `--target` or `--draft` names. What is here or known by name is not asked for; the
    hub is for the rest. Raises ModelUnavailable, BadRequest."""
    if name == EMBEDDED:
        folder = cache_folder() / EMBEDDED_NAME
        if (folder / "config.json").is_file():
            return replace(folder_shape(folder, EMBEDDED_NAME), name=EMBEDDED_NAME)
        return replace(_known(EMBEDDED_MODEL), name=EMBEDDED_NAME, stored=WIDENED_TO)
    local = Path(name).expanduser()
    if local.is_dir():
        from ..models.reduced_vocab import is_draft_folder

        return draft_shape(local) if is_draft_folder(local) else folder_shape(checked_folder(local, name), name)
    if name in known_configs():
        return _known(name)
    if name.count("/") != 1 or name[0] in "./~" or local.exists():
        from ..models.loading import find_model

        find_model(name)  # says why it is no model
    with suppress(OSError, ValueError, KeyError, SpecdemoError):  # not in the cache, or half of it: the hub may answer
        return folder_shape(checked_folder(Path(snapshot_download(name, local_files_only=True)), name), name)
    if not ask_hub:
        raise ModelUnavailable(f"The sizes of {name} are not known here: give its folder, or ask with a network.")
    return _hub_shape(name)


def shipped_draft_shape() -> ModelShape:
    """The draft that comes with the package, for the embedded target."""
    from ..models.reduced_vocab import SHIPPED

    return draft_shape(SHIPPED)


@cache
def _known(name: str) -> ModelShape:
    config = known_configs()[name]
    return shape_from(name, config, _is_lean(config))


def folder_shape(folder: Path, name: str) -> ModelShape:
    """Exact: from the headers of the folder's files."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ModelUnavailable(f"The configuration of {name} cannot be read: check {folder}.") from None
    weights, stored = read_headers(folder)
    return shape_from(name, config, _is_lean(config), weights, stored)


def draft_shape(folder: Path) -> ModelShape:
    """A distilled draft: run in its target's precision, with rows of the target's embedding as head."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rows = (int(config["draft_vocab_size"]), int(config["hidden_size"]))
    layers = [
        weight
        for weight in read_headers(folder)[0]
        if weight.name.startswith("model.") and not weight.name.endswith(".scale")
    ]
    weights = [*layers, Weight("lm_head.weight", rows), Weight("offsets", (*rows, 1))]
    sizes = {**config, "vocab_size": rows[0], "model_type": "llama", "tie_word_embeddings": False}
    name = f"{config['target'].rpartition('/')[2]} draft"
    return replace(shape_from(name, sizes, True, weights, "int8"), shares_embedding=True)


def _hub_shape(name: str) -> ModelShape:
    with hub_errors(name):
        config = json.loads(Path(hf_hub_download(name, "config.json")).read_text(encoding="utf-8"))
        try:
            metadata = get_safetensors_metadata(name)
        except NotASafetensorsRepoError:
            raise ModelUnavailable(
                f"{name} has no safetensors weights, the only kind that is read here: choose a model that has."
            ) from None
    weights = [
        Weight(tensor_name, tuple(tensor.shape))
        for file in metadata.files_metadata.values()
        for tensor_name, tensor in file.tensors.items()
    ]
    numbers = metadata.parameter_count
    most = max(numbers, key=lambda dtype: numbers[dtype])
    return shape_from(name, config, _is_lean(config), weights, DTYPES.get(most, most))


def _is_lean(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") in FAMILIES and not config.get("quantization_config")
