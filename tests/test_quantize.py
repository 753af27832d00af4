"""8 and 4 bit by bitsandbytes: real runs, rows that do not see each other, and what happens without it."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import run
from tiny_folders import save_folder
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from specdemo import methods
from specdemo.errors import ModelUnavailable
from specdemo.events import Finished
from specdemo.metrics import fold
from specdemo.models import quantize
from specdemo.models.loading import Keep, Pair, load_pair
from specdemo.models.quantize import KINDS, bitsandbytes_obstacle, card_obstacle, load_quantized
from specdemo.models.transformers_lm import TransformersLM
from specdemo.settings import Settings

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama wide enough for blocks of 64 weights, with the tiny tokenizer."""
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return save_folder(LlamaForCausalLM(config), tmp_path_factory.mktemp("quantized") / "model")


def load(folder: Path, kind: str) -> TransformersLM:
    lm = load_quantized(folder, AutoConfig.from_pretrained(folder), "m", kind, "float32", CPU, 96)
    assert isinstance(lm, TransformersLM)
    return lm


def ids_of(pair: Pair, method: str, prompt: Sequence[int], tokens: int) -> tuple[int, ...]:
    last = list(methods.run(pair, method, prompt, Settings(max_new_tokens=tokens, ignore_eos=True)))[-1]
    assert isinstance(last, Finished)
    return last.token_ids


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_target_says_what_it_is_and_computes_in_float32(folder: Path, kind: str) -> None:
    lm = load(folder, kind)
    assert lm.precision == kind
    assert "bitsandbytes" in lm.forward_path
    assert lm.dtype == torch.float32
    assert lm.device == CPU
    changed = {type(module).__name__ for module in lm.model.model.layers.modules()}
    assert changed & {"Linear8bitLt", "Linear4bit"}
    assert type(lm.model.lm_head) is torch.nn.Linear  # heads and embeddings stay as they are
    assert lm.model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_see_the_rows_after_it(folder: Path, kind: str) -> None:
    """int8 with its usual threshold would pick outlier columns over all rows: p would depend on the drafts after it.
    One feature of one later token is made to stand out, which that threshold would notice."""
    lm = load(folder, kind)
    with torch.no_grad():
        lm.embedding[7, 3] = 60.0
    prompt = torch.tensor([5, 6, 8, 9])
    alone, together = lm.open(16), lm.open(16)
    expected = alone.extend(prompt, keep=4)
    found = together.extend(torch.cat([prompt, torch.tensor([7, 7])]), keep=6)[:4]
    assert torch.allclose(found, expected, atol=1e-4)


def test_the_usual_int8_threshold_would_let_rows_see_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: with a threshold the same rows differ."""
    from transformers import BitsAndBytesConfig

    monkeypatch.setattr(
        quantize, "_settings", lambda _kind, _compute: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=6.0)
    )
    with pytest.raises(AssertionError):
        test_a_row_does_not_see_the_rows_after_it(folder, "int8")


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_gives_the_ids_of_the_quantized_models_own_standard_run(folder: Path, kind: str) -> None:
    pair = load_pair(str(folder), str(folder), device="cpu", keep=Keep("float32", kind), keep_draft=Keep("float32"))
    assert pair.target.precision == kind
    assert pair.draft is not None
    assert pair.draft.precision == "float32"  # the draft untouched
    prompt = list(range(5, 25))
    expected = ids_of(pair, "standard", prompt, 16)
    for method in ("speculative", "prompt-lookup", "hybrid"):
        assert ids_of(pair, method, prompt, 16) == expected


def test_both_models_can_be_quantized(folder: Path) -> None:
    pair = load_pair(
        str(folder), str(folder), device="cpu", keep=Keep("float32", "nf4"), keep_draft=Keep("float32", "nf4")
    )
    prompt = list(range(5, 25))
    events = list(methods.run(pair, "speculative", prompt, Settings(max_new_tokens=12, ignore_eos=True)))
    assert fold(events).alpha == 1.0  # the same weights draft and judge


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_line_quantizes(folder: Path, kind: str) -> None:
    told = run(
        "generate", "--prompt", "abc", "--target", str(folder), "--draft", "none", "--device", "cpu",
        "--quantize", kind, "--max-new-tokens", "4", "--ignore-eos", "--json",
    )  # fmt: skip
    assert told.code == 0, told.err
    assert f'"{kind}"' in told.out.splitlines()[0]


# -- without it --------------------------------------------------------------------------------------------------------


def test_missing_bitsandbytes_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    told = bitsandbytes_obstacle()
    assert told is not None
    assert "not installed" in told
    assert "pip install bitsandbytes" in told


def test_broken_bitsandbytes_is_one_sentence(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def broken(name: str, *arguments: Any, **options: Any) -> Any:
        if name == "bitsandbytes":
            raise OSError("libcudart.so.11.0: cannot open\nand much more")
        return real(name, *arguments, **options)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", broken)
    told = bitsandbytes_obstacle()
    assert told is not None
    assert "broken here (libcudart.so.11.0: cannot open)" in told
    assert "\n" not in told
    with pytest.raises(ModelUnavailable, match="broken here"):
        load_quantized(folder, AutoConfig.from_pretrained(folder), "m", "nf4", "float32", CPU, 96)


def test_without_bitsandbytes_a_run_goes_on_and_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    told = run(
        "generate", "--prompt", "abc", "--target", str(folder), "--draft", "none", "--device", "cpu",
        "--quantize", "nf4", "--max-new-tokens", "4", "--ignore-eos",
    )  # fmt: skip
    assert told.code == 0, told.err
    assert "bitsandbytes is not installed" in told.err


@pytest.mark.process
def test_loading_without_quantization_does_not_import_it(folder: Path) -> None:
    import subprocess

    code = (
        "import sys; from specdemo.plan.load import load_fitting; "
        f"load_fitting({str(folder)!r}, 'none', device='cpu'); print('bitsandbytes' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert done.stdout == "False\n"


def test_an_unknown_kind_is_refused(folder: Path) -> None:
    told = run("generate", "--prompt", "abc", "--target", str(folder), "--draft", "none", "--quantize", "int3")
    assert told.code == 2
    assert "no --quantize 'int3'" in told.err


def test_cards_that_have_no_kernels_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (7, 0))
    card = torch.device("cuda", 0)
    assert "nf4" in (card_obstacle("int8", card) or "")
    assert card_obstacle("nf4", card) is None
    assert card_obstacle("nf4", torch.device("mps")) is not None
    assert card_obstacle("int8", CPU) is None


# -- the embedded model ------------------------------------------------------------------------------------------------


@pytest.mark.embedded
@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_target_runs_quantized_with_its_own_draft(embedded_folder: Path, kind: str) -> None:
    """Slow on a processor: 8 tokens."""
    pair = load_pair("embedded", "auto", device="cpu", keep=Keep("float32", kind))
    assert pair.target.precision == kind
    assert pair.draft is not None
    prompt = pair.tokenizer.encode("The capital of France is")
    events = list(methods.run(pair, "speculative", prompt, Settings(max_new_tokens=8, ignore_eos=True), explain=False))
    last = events[-1]
    assert isinstance(last, Finished)
    assert fold(events).drafted > 0
    assert last.token_ids == ids_of(pair, "standard", prompt, 8)
