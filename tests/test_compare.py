"""Comparing all methods: each runs once, a fault is a row, Stop ends it; and the lines for other programs are real."""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tiny_folders import save_folder

from specdemo import cli, elsewhere
from specdemo.arena import Arena, RaceRequest
from specdemo.comparison import Comparison, Progress, Row, Winner
from specdemo.elsewhere import STAND_IN, USAGES, Usage, usages
from specdemo.errors import BadRequest
from specdemo.events import Finished
from specdemo.models.loading import Pair, load_pair
from specdemo.settings import Settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

METHODS = ["standard", "speculative", "prompt-lookup", "hybrid", "ssd", "hf", "hf-assisted"]
GREEDY = Settings(max_new_tokens=24, ignore_eos=True, draft_length=3)


@pytest.fixture(scope="module")
def folders(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: LlamaForCausalLM, tiny_draft: LlamaForCausalLM
) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("models")
    return save_folder(tiny_target, root / "target"), save_folder(tiny_draft, root / "draft")


@pytest.fixture(scope="module")
def pair(folders: tuple[Path, Path]) -> Pair:
    target, draft = map(str, folders)
    return load_pair(target, draft, "float32", "cpu")


def ready(pair: Pair) -> Arena:
    arena = Arena(lambda progress: pair)
    arena.load()
    assert arena.status.state == "ready", arena.status.message
    return arena


def compared(arena: Arena, settings: Settings = GREEDY) -> list[Comparison]:
    return list(arena.compare(RaceRequest("one two one two one two", settings)))


def rows(items: list[Comparison]) -> dict[str, Row]:
    return {item.method: item for item in items if isinstance(item, Row)}


def test_every_method_runs_once_and_the_fastest_is_named(pair: Pair) -> None:
    arena = ready(pair)
    items = compared(arena)
    table = rows(items)
    assert list(table) == METHODS
    assert all(row.reason is None and row.tokens == 24 for row in table.values()), table
    assert all(row.equal for row in table.values())  # float32: the same text, six times
    assert table["standard"].speedup == pytest.approx(1.0)
    baseline = table["standard"].tokens_per_second
    for row in table.values():
        assert row.speedup == pytest.approx((row.tokens_per_second or 0) / (baseline or 1), rel=1e-6)
    assert (table["speculative"].mean_acceptance_length or 0) > 1.0
    assert 0 < (table["speculative"].acceptance_rate or 0) <= 1
    assert table["standard"].acceptance_rate is None
    winner = items[-1]
    assert isinstance(winner, Winner)
    assert winner.method == max(table.values(), key=lambda row: row.tokens_per_second or 0).method
    assert arena.status.state == "ready"


def test_progress_counts_methods_and_tokens(pair: Pair) -> None:
    seen = [item for item in compared(ready(pair)) if isinstance(item, Progress)]
    assert list(dict.fromkeys((item.index, item.method) for item in seen)) == list(enumerate(METHODS))
    assert {item.count for item in seen} == {len(METHODS)}
    for name in ("standard", "speculative"):
        shares = [item.share for item in seen if item.method == name]
        assert shares == sorted(shares)
        assert shares[-1] == 1.0


def test_without_a_plain_draft_model_the_row_says_why(pair: Pair) -> None:
    arena = ready(replace(pair, draft=None, draft_folder=None))
    table = rows(compared(arena))
    assert list(table) == ["standard", "prompt-lookup", "hf", "hf-assisted"]
    assert "draft model" in (table["hf-assisted"].reason or "")
    assert table["hf-assisted"].tokens_per_second is None
    assert table["hf"].reason is None


def test_a_method_that_breaks_is_a_row_and_the_others_go_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdemo.drafters import draft_model

    def broken(*args: Any, **more: Any) -> None:
        raise MemoryError

    arena = ready(pair)
    monkeypatch.setattr(draft_model.DraftModel, "propose", broken)
    table = rows(compared(arena))
    assert "memory ran out" in (table["speculative"].reason or "")
    assert table["prompt-lookup"].reason is None
    assert list(table) == METHODS


@pytest.mark.parametrize("during", ["standard", "hf"])
def test_stop_ends_it_after_a_row_of_what_there_is(pair: Pair, during: str) -> None:
    arena = ready(pair)
    items = []
    settings = replace(GREEDY, max_new_tokens=400)
    for item in arena.compare(RaceRequest("one two", settings), visitor="me"):
        items.append(item)
        if isinstance(item, Progress) and item.method == during and (item.share > 0 or during == "hf"):
            assert arena.stop("me")
    assert not isinstance(items[-1], Winner)
    last = list(rows(items).values())[-1]
    assert (last.method, last.finish_reason) == (during, "cancelled")
    assert arena.status.state == "ready"


def test_closing_it_frees_the_models(pair: Pair) -> None:
    arena = ready(pair)
    items = arena.compare(RaceRequest("one two", replace(GREEDY, max_new_tokens=400)))
    for item in items:
        if isinstance(item, Progress) and item.method == "hf":
            break
    assert arena.status.state == "busy"
    items.close()  # type: ignore[attr-defined]
    assert arena.status.state == "ready"
    ends = [event for event in arena.race(RaceRequest("one two", GREEDY)) if isinstance(event, Finished)]
    assert [end.finish_reason for end in ends] == ["length", "length"]


def test_a_prompt_that_does_not_fit_is_one_sentence(pair: Pair) -> None:
    arena = ready(pair)
    with pytest.raises(BadRequest, match=r"600 tokens .* 512"):
        list(arena.compare(RaceRequest("x" * 600, GREEDY)))
    with pytest.raises(BadRequest, match="empty"):
        list(arena.compare(RaceRequest(" ", GREEDY)))
    assert arena.status.state == "ready"


# -- the same in other programs -----------------------------------------------------------------------------------

# Options as their programs' own documentation lists them.
LLAMA_SERVER = {
    "-m",
    "--spec-type",
    "--spec-draft-model",
    "--spec-draft-n-max",
    "--spec-draft-n-min",
    "--spec-ngram-simple-size-n",
    "--spec-ngram-simple-size-m",
    "--spec-ngram-simple-min-hits",
}
LLAMA_SPEC_TYPES = {"none", "draft-simple", "draft-eagle3", "draft-mtp", "ngram-simple", "ngram-map-k", "ngram-mod"}
VLLM_SPECULATIVE_CONFIG = {"model", "method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"}
VLLM_METHODS = {"draft_model", "ngram", "suffix", "eagle", "eagle3", "mtp"}


def every_usage(pair: Pair) -> list[tuple[str, Usage]]:
    settings = [GREEDY, Settings(temperature=0.7, top_p=0.9, draft_length=4)]
    return [(method, usage) for method in USAGES for each in settings for usage in usages(method, pair, each)]


def test_every_method_of_a_comparison_has_a_line() -> None:
    assert set(USAGES) == set(METHODS)
    assert [method for method in METHODS if not USAGES[method]] == ["ssd"]  # no other program has it yet


def test_the_commands_parse_and_name_real_options(pair: Pair) -> None:
    seen = set()
    for method, usage in every_usage(pair):
        assert "{" not in usage.code.replace("{'", "").replace('{"', ""), usage.code
        seen.add(usage.program)
        if usage.program == "llama.cpp":
            program, *words = shlex.split(usage.code)
            options = dict(zip(words[::2], words[1::2], strict=True))
            assert program == "llama-server"
            assert set(options) <= LLAMA_SERVER
            assert set(options.get("--spec-type", "none").split(",")) <= LLAMA_SPEC_TYPES
            assert ("--spec-draft-model" in options) == (method in ("speculative", "hf-assisted", "hybrid"))
            assert options["-m"].endswith(".gguf")
        elif usage.program == "vLLM":
            words = shlex.split(usage.code)
            assert words[:2] == ["vllm", "serve"]
            if method not in ("standard", "hf"):
                assert words[3] == "--speculative-config"
                config = json.loads(words[4])
                assert set(config) <= VLLM_SPECULATIVE_CONFIG
                assert config["method"] in VLLM_METHODS
                assert config["num_speculative_tokens"] in (3, 4)
        elif usage.program == "specdemo":
            python, dash_m, name, *arguments = shlex.split(usage.code)
            assert (python, dash_m, name) == ("python", "-m", "specdemo")
            args = cli._parser("generate").parse_args(arguments)
            assert args.method == method
    assert seen == {"specdemo", "transformers", "vLLM", "llama.cpp"}


@pytest.mark.parametrize("method", ["standard", "hf", "speculative", "hf-assisted", "prompt-lookup"])
def test_the_lines_for_transformers_run(pair: Pair, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tiny folders in place of the models' names; what is asked for must be what `generate` knows."""
    from transformers import AutoTokenizer, GenerationConfig
    from transformers.generation.utils import GenerationMixin

    root = pair.target_folder.parent
    monkeypatch.setattr(elsewhere, "_public_name", lambda name: str(root / Path(name).name))
    (code,) = [
        usage.code
        for usage in usages(method, pair, replace(GREEDY, max_new_tokens=6))
        if usage.program == "transformers"
    ]
    known = set(inspect.signature(GenerationMixin.generate).parameters) | set(GenerationConfig().to_dict())
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    (generate,) = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "generate"]
    asked = {keyword.arg for keyword in generate.keywords if keyword.arg}
    assert asked <= known | {"temperature", "top_p"}
    names: dict[str, Any] = {}
    tokenizer = AutoTokenizer.from_pretrained(root / "target")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: tokenizer)
    with contextlib.redirect_stderr(io.StringIO()), pytest.MonkeyPatch.context() as quiet:
        quiet.setenv("TRANSFORMERS_VERBOSITY", "error")
        exec(code, names)
    new = names["output"].shape[1] - names["inputs"]["input_ids"].shape[1]
    assert 1 <= new <= 6
    if "draft" in names:
        assert names["draft"].generation_config.num_assistant_tokens == GREEDY.draft_length


def test_a_draft_of_our_own_form_is_replaced_by_a_stand_in(pair: Pair, tmp_path: Path) -> None:
    from specdemo.models import reduced_vocab

    (tmp_path / "config.json").write_text(json.dumps({"format": reduced_vocab._FORMAT}), encoding="utf-8")
    lines = usages("speculative", replace(pair, draft_folder=tmp_path), GREEDY)
    others = [usage for usage in lines if usage.program != "specdemo"]
    assert all(usage.own_draft and STAND_IN in usage.code for usage in others)
    plain = usages("speculative", pair, GREEDY)
    assert not any(usage.own_draft or STAND_IN in usage.code for usage in plain)
    assert not any(usage.own_draft for usage in usages("prompt-lookup", replace(pair, draft_folder=tmp_path), GREEDY))


def test_no_folder_above_a_model_is_told(pair: Pair) -> None:
    above = str(pair.target_folder.parent)
    assert not any(above in usage.code for _, usage in every_usage(pair))
