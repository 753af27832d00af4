"""From names to models: which forward runs, what goes with a target, and one sentence for everything that cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.errors as hub_errors
import pytest
import torch
from tiny_folders import save_folder
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from specdemo import methods
from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.events import Finished
from specdemo.models import hub, loading, pretrained
from specdemo.models.lean import LeanLM
from specdemo.models.loading import load_pair
from specdemo.models.pretrained import explicit_llama
from specdemo.models.transformers_lm import TransformersLM
from specdemo.settings import Settings


@pytest.fixture(scope="module")
def target_folder(tiny_target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_target, tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def draft_folder(tiny_draft: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_draft, tmp_path_factory.mktemp("models") / "draft")


@pytest.fixture
def copy(target_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(target_folder, tmp_path / "copy"))


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_llama_runs_through_the_lean_forward_and_answers_as_generate_does(
    target_folder: Path, draft_folder: Path, tiny_target: LlamaForCausalLM
) -> None:
    pair = load_pair(str(target_folder), str(draft_folder), dtype="float32", device="cpu")
    assert isinstance(pair.target, LeanLM)
    assert isinstance(pair.draft, LeanLM)
    prompt = list(range(5, 25))
    expected = tiny_target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, 20:].tolist()
    for name in ("standard", "speculative", "prompt-lookup", "hybrid", "ssd"):
        end = list(methods.run(pair, name, prompt, Settings(max_new_tokens=24)))[-1]
        assert isinstance(end, Finished)
        assert list(end.token_ids) == expected


def test_another_architecture_runs_through_transformers_and_says_so(target_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=96, n_positions=128, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    folder = Path(shutil.copytree(target_folder, tmp_path / "gpt2"))
    GPT2LMHeadModel(config).save_pretrained(folder)
    pair = load_pair(str(folder), "none", dtype="auto", device="cpu")
    assert isinstance(pair.target, TransformersLM)
    assert "gpt2" in pair.target.forward_path
    assert pair.target.precision == "float32"
    assert pair.target.context_length == 128
    with pytest.raises(BadRequest, match="lean forward only"):
        load_pair(str(folder), "none", dtype="int8", device="cpu")


def test_every_end_of_sequence_id_counts(copy: Path) -> None:
    change(copy / "generation_config.json", eos_token_id=[2, 7, 9])
    assert load_pair(str(copy), "none", device="cpu").eos_ids == {2, 7, 9}


def test_a_smaller_real_vocabulary_cuts_the_logits(copy: Path) -> None:
    """Rows past the tokenizer's ids are padding: they can never be drawn (pitfall 10)."""
    model = LlamaForCausalLM.from_pretrained(copy)
    model.resize_token_embeddings(128)
    model.save_pretrained(copy)
    pair = load_pair(str(copy), "none", dtype="float32", device="cpu")
    assert pair.target.vocab_size == 96
    cache = pair.target.open(8)
    assert cache.extend(torch.tensor([1, 2, 3]), keep=2).shape == (2, 96)


def test_another_tokenizer_is_refused_with_what_would_work(target_folder: Path, copy: Path) -> None:
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelUnavailable, match=r"tokenizers differ.*prompt-lookup"):
        load_pair(str(target_folder), str(copy), device="cpu")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"half a file"), "cannot be loaded"),
        (lambda folder: change(folder / "config.json", model_type="nothing-known"), "cannot be read"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer"),
    ],
)
def test_a_broken_folder_is_one_sentence(copy: Path, spoil: object, says: str) -> None:
    spoil(copy)  # type: ignore[operator]
    with pytest.raises(ModelUnavailable, match=says) as caught:
        load_pair(str(copy), "none", device="cpu")
    assert "\n" not in str(caught.value)


def test_names_that_are_no_model() -> None:
    for name, says in (("./nowhere", "no folder"), ("weights.gguf", "single file"), ("a b", "hub id")):
        with pytest.raises(ModelUnavailable, match=says):
            load_pair(name, "none", device="cpu")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (hub_errors.LocalEntryNotFoundError("offline"), "cannot be reached"),
        (ConnectionError("refused"), "cannot be reached"),
        (OSError(28, "No space left on device"), "free some space"),
    ],
)
def test_the_hub_and_the_disk_fail_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def download(*_args: object, **_options: object) -> str:
        raise error

    monkeypatch.setattr(hub, "snapshot_download", download)
    with pytest.raises(ModelUnavailable, match=says):
        load_pair("owner/model", "none", device="cpu")


@pytest.mark.parametrize("size", [9, 0, None])  # a file is missing, however large it is
def test_a_hub_model_is_loaded_from_what_the_hub_gave(
    size: int | None, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, allow_patterns: list[str], dry_run: bool = False, **options: object) -> Any:
        asked.append((name, "*.safetensors" in allow_patterns, "*.bin" in allow_patterns, dry_run))
        assert not options.get("local_files_only")
        return [SimpleNamespace(file_size=size, will_download=True)] if dry_run else str(target_folder)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert load_pair("owner/model", "none", device="cpu").target.name == "owner/model"
    assert asked == [("owner/model", True, False, True), ("owner/model", True, False, False)]


def test_devices_and_dtypes_that_are_not_there() -> None:
    with pytest.raises(BadRequest, match="cuda"):
        loading.choose_device("warp")
    with pytest.raises(BadRequest, match="float32"):
        loading.choose_precision("float8", torch.device("cpu"))


@pytest.mark.embedded
def test_the_embedded_pair_races_by_default(embedded_folder: Path) -> None:
    pair = load_pair(device="cpu")
    assert pair.target.name == "SmolLM2-135M-Instruct"
    assert pair.draft is not None
    assert any("4-bit" in note for note in pair.notes)
    assert pair.eos_ids == {0, 2}


@pytest.mark.embedded
def test_the_embedded_model_drafts_for_itself_and_all_is_accepted(embedded_folder: Path) -> None:
    """In float32, where a forward of K + 1 rows rounds as one of a single row does (pitfall 7)."""
    pair = load_pair("embedded", "embedded", dtype="float32", device="cpu")
    prompt = pair.tokenizer.encode("The lighthouse on Grey Point was built")
    ends = {}
    for name in ("standard", "speculative"):
        events = list(methods.run(pair, name, prompt, Settings(max_new_tokens=16), explain=False))
        ends[name] = events[-1]
        if name == "speculative":
            assert methods.resolve(pair, name)[0].name == "speculative"
            from specdemo.metrics import fold

            assert fold(events).alpha == 1.0
    assert ends["standard"].token_ids == ends["speculative"].token_ids  # type: ignore[union-attr]


def _complete(folder: Path) -> dict[str, object]:
    """The configuration in `folder` with every default of transformers' class told."""
    config = LlamaForCausalLM.from_pretrained(folder).config
    told = {key: value for key, value in config.to_dict().items() if value is not None}
    return told | {"head_dim": config.hidden_size // config.num_attention_heads}


def test_a_complete_configuration_is_read_as_it_stands_and_any_other_by_transformers(copy: Path) -> None:
    described = _complete(copy)
    ours, theirs = explicit_llama(described), LlamaForCausalLM.from_pretrained(copy).config
    assert ours is not None
    for name in (*pretrained._TOLD, "rope_parameters", "model_type", "is_encoder_decoder"):
        if name != "head_dim":
            assert getattr(ours, name) == getattr(theirs, name)
    assert LeanLM.supports(ours) is None
    for name in ("hidden_size", "rms_norm_eps", "head_dim", "tie_word_embeddings", "rope_parameters", "model_type"):
        assert explicit_llama({key: value for key, value in described.items() if key != name}) is None
    assert explicit_llama(described | {"model_type": "mistral"}) is None
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    assert explicit_llama(described | {"rope_parameters": scaled}) is None


@pytest.mark.process
def test_nothing_is_imported_that_a_complete_llama_does_not_need(copy: Path, tiny_target: LlamaForCausalLM) -> None:
    """transformers' class for a configuration brings seconds of other imports along."""
    change(copy / "config.json", **_complete(copy))
    program = """
import sys, torch
from specdemo.models.loading import load_pair
pair = load_pair(sys.argv[1], "none", dtype="float32", device="cpu")
print(pair.target.open(9).extend(torch.arange(3, 9), keep=1).argmax().item(), pair.text.piece(7))
assert not [name for name in sys.modules if name.startswith(("transformers.models.", "accelerate"))], sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", program, str(copy)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    expected = tiny_target(torch.arange(3, 9)[None]).logits[0, -1].argmax().item()
    assert ran.stdout.split()[0] == str(expected)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the mapped files of a process from /proc")
def test_a_loaded_model_keeps_no_file_mapped(target_folder: Path) -> None:
    """Else as much memory again as the weights' file would count as this process's."""
    pair = load_pair(str(target_folder), "none", "float32", "cpu")
    assert str(target_folder) not in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert pair.target.name == str(target_folder)
