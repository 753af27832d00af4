"""Models that cannot be used: each is one sentence that says what to do, exit code 2, and nothing half loaded stays."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.errors as hub_errors
import pytest
import torch
from test_cli import run
from tiny_folders import save_folder
from transformers import LlamaForCausalLM, MambaConfig, MambaForCausalLM, T5Config

from specdemo.models import hub
from specdemo.models.hub import INDEX
from specdemo.plan import sources

Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tiny_target: LlamaForCausalLM, tmp_path: Path) -> Path:
    return save_folder(tiny_target, tmp_path / "model")


def refused(*names: str) -> str:
    """The one line that a run with these models ends with."""
    told = run("generate", "--prompt", "abc", "--max-new-tokens", "4", "--device", "cpu", *names)
    assert told.code == 2
    assert told.out == ""
    assert len(told.err.strip().splitlines()) == 1
    assert "Traceback" not in told.err
    return told.err


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def as_gguf(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.Q4_K_M.gguf")


def cut(folder: Path) -> None:
    """A download that broke off."""
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def lack_a_shard(folder: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors").rename(folder / names["a"])
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def as_encoder_decoder(folder: Path) -> None:
    T5Config(vocab_size=96, d_model=32, num_layers=1, num_heads=2, d_kv=16, d_ff=32).save_pretrained(folder)


def as_recurrent(folder: Path) -> None:
    config = MambaConfig(vocab_size=96, hidden_size=32, num_hidden_layers=1, state_size=4, conv_kernel=2)
    MambaForCausalLM(config).save_pretrained(folder)


def with_code(folder: Path) -> None:
    change(
        folder / "config.json",
        model_type="their_own",
        architectures=["TheirOwn"],
        auto_map={"AutoConfig": "configuration.TheirOwn", "AutoModelForCausalLM": "modeling.TheirOwn"},
    )
    (folder / "configuration.py").write_text("raise SystemExit('code of a repository ran')\n")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (as_pickle, "pickle files"),
        (as_gguf, "GGUF"),
        (cut, "damaged or incomplete"),
        (lack_a_shard, "1 of its weight files are missing"),
        (without_tokenizer, "tokenizer"),
        (as_encoder_decoder, "encoder-decoder"),
        (as_recurrent, "cannot be rolled back"),
        (with_code, "needs code from its repository"),
        (lambda folder: (folder / "config.json").write_text("{"), "configuration"),
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
    ],
    ids=lambda value: getattr(value, "__name__", "") if callable(value) else "",
)
@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_folder_that_is_no_usable_model_is_refused(
    folder: Path, tiny_target: LlamaForCausalLM, tmp_path: Path, spoil: Spoil, says: str, role: str
) -> None:
    good = save_folder(tiny_target, tmp_path / "good")
    spoil(folder)
    names = {"target": str(good), "draft": str(good), role: str(folder)}
    told = refused("--target", names["target"], "--draft", names["draft"])
    assert says in told
    assert "model" in told  # its name


@pytest.mark.parametrize("name", ["weights.gguf", "./nowhere", "/no/such/folder"])
def test_a_path_that_is_no_model(name: str) -> None:
    assert name in refused("--target", name)


def response(status: int) -> Any:
    return httpx.Response(status, request=httpx.Request("GET", "http://hub/owner/model"))


FAULTS = [
    (hub_errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
    (ConnectionError("refused"), "the hub cannot be reached"),
    (TimeoutError("slow"), "the hub cannot be reached"),
    (hub_errors.GatedRepoError("gated", response=response(403)), "hf auth login"),
    (hub_errors.RepositoryNotFoundError("none", response=response(404)), "no model owner/model"),
    (hub_errors.HFValidationError("odd"), "neither a folder nor a hub id"),
    (OSError(28, "No space left on device"), "free some space"),
    (OSError(30, "Read-only file system"), "check the cache folder"),
]


@pytest.mark.parametrize(("error", "says"), FAULTS)
def test_what_the_hub_refuses_while_planning(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    def ask(*_arguments: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(sources, "hf_hub_download", ask)
    monkeypatch.setattr(sources, "snapshot_download", ask)
    assert says in refused("--target", "owner/model")


@pytest.mark.parametrize(("error", "says"), FAULTS[-2:])
def test_what_fails_while_fetching(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    """The sizes are known by then, from the headers."""

    def fetch(*_arguments: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(sources, "snapshot_download", lambda _name, **_options: str(folder))
    monkeypatch.setattr(hub, "snapshot_download", fetch)
    assert says in refused("--target", "owner/model", "--draft", "none")


def test_nothing_half_loaded_stays_in_memory(folder: Path, tmp_path: Path) -> None:
    """The target is loaded and warm when the draft turns out to be broken."""
    draft = Path(shutil.copytree(folder, tmp_path / "draft"))
    tokenizer = json.loads((draft / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (draft / "tokenizer.json").write_text(json.dumps(tokenizer))

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    refused("--target", str(folder), "--draft", str(draft))
    before = tensors()
    assert "tokenizers differ" in refused("--target", str(folder), "--draft", str(draft))
    assert tensors() <= before
