"""Pairs whose tokenizers differ: found before any weight is read, with the reason and with what would work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_benchmark import SUITE
from test_cli import run
from tiny_folders import save_folder
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.models import loading
from specdemo.models.loading import load_pair
from specdemo.models.vocabulary import check_same_vocabulary, read_vocabulary
from specdemo.plan.load import plan_here
from specdemo.plan.tokenizers import tokenizers_note
from specdemo.settings import Settings
from specdemo.text import encode_prompt
from specdemo.transformers_lanes import TransformersLane, TransformersModels


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, tiny_target: LlamaForCausalLM) -> Path:
    return save_folder(tiny_target, tmp_path_factory.mktemp("target") / "target")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory, tiny_target: LlamaForCausalLM, target: Path) -> Path:
    """A model whose ids go the other way round, and which has four more."""
    folder = save_folder(tiny_target, tmp_path_factory.mktemp("stranger") / "stranger")
    config = LlamaConfig.from_pretrained(folder)
    config.vocab_size = 100
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    own = [token for token, id in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1]) if id > 2]
    named = ["<pad>", "<s>", "</s>", *reversed(own), *(f"<extra{i}>" for i in range(4))]
    tokenizer["model"]["vocab"] = {token: id for id, token in enumerate(named)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_a_vocabulary_is_read_without_transformers(target: Path, tmp_path: Path) -> None:
    found = read_vocabulary(target)
    assert found is not None
    assert len(found) == 96
    assert found["<s>"] == 1
    assert read_vocabulary(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}}')
    assert read_vocabulary(tmp_path) == {"<unk>": 0, "a": 1}
    for broken in ("{", "[]", '{"model": {}}', '{"model": {"vocab": 7}}'):
        (tmp_path / "tokenizer.json").write_text(broken)
        assert read_vocabulary(tmp_path) is None


def test_what_counts_as_the_same() -> None:
    ours = {str(i): i for i in range(100)}
    check_same_vocabulary("t", ours, "d", {**ours, "more": 100})  # padded or extended
    check_same_vocabulary("t", ours, "d", {str(i): i for i in range(95)})
    with pytest.raises(ModelUnavailable, match="2 tokens have other ids"):
        check_same_vocabulary("t", ours, "d", {**ours, "3": 4, "4": 3})
    with pytest.raises(ModelUnavailable, match="20 tokens are missing"):
        check_same_vocabulary("t", ours, "d", {str(i): i for i in range(80)})


def test_plan_refuses_a_pair_whose_tokenizers_differ(target: Path, stranger: Path) -> None:
    told = run("plan", "--target", str(target), "--draft", str(stranger))
    assert told.code == 2
    assert len(told.err.strip().splitlines()) == 1
    for words in ("their tokenizers differ", "prompt-lookup", "hf-universal"):
        assert words in told.err
    assert run("plan", "--target", str(target), "--draft", str(target)).code == 0


def test_plan_says_where_it_could_not_compare(target: Path) -> None:
    told = run("plan", "--target", "Qwen/Qwen3-8B", "--draft", "Qwen/Qwen3-0.6B", "--memory", "80GiB", "--json")
    assert any("compared when the pair is loaded" in note for note in json.loads(told.out)["notes"])
    assert tokenizers_note(str(target), str(target)) is None
    assert tokenizers_note(str(target), "owner/never-fetched") is not None
    alone = run("plan", "--target", "Qwen/Qwen3-8B", "--draft", "none", "--memory", "80GiB", "--json")
    assert json.loads(alone.out)["notes"] == [
        "The cards are taken to compute in bfloat16 and to have kernels for 8 and 4 bits."
    ]


def test_no_weight_is_read_of_a_pair_that_cannot_work(
    target: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load_language_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ModelUnavailable, match="tokenizers differ"):
        load_pair(str(target), str(stranger), device="cpu")
    with pytest.raises(ModelUnavailable, match="tokenizers differ"):
        plan_here(str(target), str(stranger), device="cpu")


# -- what would work ---------------------------------------------------------------------------------------------------


def test_universal_assisted_generation_gives_the_targets_text(target: Path, stranger: Path) -> None:
    pair = load_pair(str(target), "none", "float32", "cpu")
    models = TransformersModels(pair, str(stranger))
    ids = encode_prompt(pair.tokenizer, SUITE[0]["prompt"], raw=True)
    settings = Settings(max_new_tokens=16, draft_length=4, ignore_eos=True)
    plain = TransformersLane("hf", models).run(ids, settings)
    lane = TransformersLane("hf-universal", models)
    found = lane.run(ids, settings)
    assert found.token_ids == plain.token_ids
    assert found.metrics.drafted > 0  # in the target's ids
    assert 0 <= found.metrics.accepted <= found.metrics.drafted
    assert lane.draft == str(stranger)
    with pytest.raises(BadRequest, match="temperature 0 only"):
        lane.run(ids, Settings(max_new_tokens=4, temperature=1.0))
    with pytest.raises(ModelUnavailable, match="same vocabulary size"):
        TransformersLane("hf-assisted", models)


@pytest.mark.parametrize("assistant", [None, "target"])
def test_what_universal_generation_cannot_take_is_a_sentence(target: Path, assistant: Any) -> None:
    pair = load_pair(str(target), "none", "float32", "cpu")
    models = TransformersModels(pair, str(target) if assistant else None)
    with pytest.raises((BadRequest, ModelUnavailable), match="hf-universal"):
        TransformersLane("hf-universal", models)
