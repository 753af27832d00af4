"""Commands that bring up both servers: where they go, in which precision, and that they say so."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

from specdemo import cli
from specdemo.errors import BadRequest
from specdemo.plan.pairs import shapes_of
from specdemo.plan.sizes import GIB
from specdemo.served.plan import OVERHEAD, Wanted, cluster_of, plan, server_bytes, split_for

LLAMA = ("meta-llama/Llama-3.1-70B-Instruct", "meta-llama/Llama-3.1-8B-Instruct")
QWEN = ("Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B")


def commands(
    gpus: str, nodes: int = 1, engine: str = "vllm", names: tuple[str, str] = LLAMA, **wanted: Any
) -> list[str]:
    return [str(c) for c in plan(engine, cluster_of(gpus, nodes), *shapes_of(*names), Wanted(**wanted))[1]]


def options(command: str) -> dict[str, str]:
    """The options of a command with their values."""
    words = shlex.split(command)
    return {a: b for a, b in zip(words, [*words[1:], ""], strict=True) if a.startswith("--")}


def test_eight_cards_hold_both_servers_in_16_bit_on_four_each() -> None:
    standard, speculative, page = commands("8x80GiB")
    assert standard.startswith("CUDA_VISIBLE_DEVICES=0,1,2,3 vllm serve meta-llama/Llama-3.1-70B-Instruct ")
    assert speculative.startswith("CUDA_VISIBLE_DEVICES=4,5,6,7 ")
    assert options(standard)["--tensor-parallel-size"] == options(speculative)["--tensor-parallel-size"] == "4"
    assert "--quantization" not in standard + speculative
    drafter = json.loads(options(speculative)["--speculative-config"])
    assert drafter == {
        "method": "draft_model", "model": LLAMA[1], "num_speculative_tokens": 5, "draft_tensor_parallel_size": 4,
    }  # fmt: skip
    assert options(speculative)["--per-request-spec-decode-metrics"] == "detailed"
    assert "--speculative-config" not in standard
    assert page == (
        "python app.py --served standard=http://127.0.0.1:8001,speculative=http://127.0.0.1:8002 "
        "--model Llama-3.1-70B-Instruct"
    )


def test_both_servers_differ_in_the_drafter_alone() -> None:
    standard, speculative, _ = commands("8x80GiB")
    a, b = options(standard), options(speculative)
    extra = {"--speculative-config", "--per-request-spec-decode-metrics"}
    assert {name: value for name, value in b.items() if name not in extra} == {**a, "--port": "8002"}


def test_four_cards_take_8_bit() -> None:
    standard, speculative, _ = commands("4x80GiB")
    assert options(standard)["--quantization"] == options(speculative)["--quantization"] == "fp8"
    assert options(standard)["--tensor-parallel-size"] == "2"


def test_what_one_node_cannot_hold_goes_over_several() -> None:
    large = ("mistralai/Mistral-Large-Instruct-2407", "mistralai/Mistral-7B-Instruct-v0.3")
    found = commands("4x80GiB", nodes=4, names=large)
    assert len(found) == 5
    ranks = [(options(c)["--node-rank"], options(c)["--master-addr"], "--headless" in c) for c in found[:4]]
    assert ranks == [("0", "NODE0", False), ("1", "NODE0", True), ("0", "NODE2", False), ("1", "NODE2", True)]
    assert {options(c)["--pipeline-parallel-size"] for c in found[:4]} == {"2"}
    assert "speculative=http://NODE2:8002" in found[4]


def test_servers_of_one_node_each_go_on_two() -> None:
    standard, speculative, page = commands("1x80GiB", nodes=2, names=QWEN)
    assert "CUDA_VISIBLE_DEVICES" not in standard + speculative
    assert "standard=http://NODE0:8001,speculative=http://NODE1:8002" in page


@pytest.mark.parametrize(
    ("wanted", "drafter"),
    [
        ({"drafter": "ngram"}, {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 1}),
        ({"drafter": "eagle", "head": "me/head"}, {"method": "eagle3", "model": "me/head"}),
    ],
)
def test_other_drafters(wanted: dict[str, Any], drafter: dict[str, Any]) -> None:
    _, speculative, _ = commands("2x80GiB", names=QWEN, draft_length=3, **wanted)
    told = json.loads(options(speculative)["--speculative-config"])
    assert told == {**drafter, "num_speculative_tokens": 3}


def test_llama_cpp_serves_both_lanes_by_one_server() -> None:
    server, page = commands("2x80GiB", engine="llama.cpp", names=("Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"))
    assert options(server)["--spec-draft-model"] == "Qwen3-0.6B.gguf"
    assert "standard=http://127.0.0.1:8001,speculative=http://127.0.0.1:8001" in page


def test_the_sum_is_weights_and_caches() -> None:
    target, draft = shapes_of(*LLAMA)
    small = Wanted(sequences=1, context=4096)
    caches = 4096 * 2 * 2 * (80 * 8 * 128 + 32 * 8 * 128)
    weights = 2 * (target.parameters + draft.parameters)  # type: ignore[union-attr]
    assert server_bytes(target, draft, "bfloat16", small) == pytest.approx(weights + caches, rel=0.001)
    assert server_bytes(target, None, "fp8", small) < 0.55 * server_bytes(target, None, "bfloat16", small)
    cluster = cluster_of("8x80GiB")
    split = split_for(cluster, target, draft, Wanted())
    assert split.bytes <= split.cards * cluster.room
    assert split.bytes > split.cards / 2 * cluster.room
    assert cluster.room == int(0.9 * 80 * GIB) - OVERHEAD


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--gpus", "many"], "names no cards"),
        (["--gpus", "0x80GiB"], "names no cards"),
        (["--gpus", "2x1GiB"], "has no room for a model"),
        (["--gpus", "2x80GiB", "--nodes", "0"], "--nodes is a whole number"),
        (["--gpus", "1x24GiB", "--pair", "qwen3-32b-0.6b"], "does not fit: a server needs"),
        (["--gpus", "2x24GiB", "--pair", "qwen3-8b-0.6b"], "fewer --sequences"),
        (["--gpus", "2x80GiB", "--drafter", "eagle", "--pair", "qwen3-8b-0.6b"], "name it with --head"),
        (["--gpus", "2x80GiB", "--drafter", "eagle", "--head", "x/y", "--engine", "llama.cpp"], "for vLLM only"),
        (["--gpus", "2x80GiB", "--nodes", "2", "--engine", "llama.cpp"], "planned on one node"),
        (["--gpus", "2x80GiB", "--pair", "none-such"], "There is no pair"),
    ],
)
def test_what_cannot_be_planned_gets_a_sentence(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve-plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert len(error.splitlines()) == 1


def test_the_printed_plan_is_a_script_and_the_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["serve-plan", "--pair", "qwen3-8b-0.6b", "--gpus", "2x80GiB"]
    assert cli.main(asked) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("#")]
    assert cli.main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [shlex.split(line) for line in lines] == [command["words"] for command in document["commands"]]
    assert document["cards_a_server"] == 1


def test_a_pair_without_a_draft_model_looks_its_drafts_up() -> None:
    with pytest.raises(BadRequest):
        plan("vllm", cluster_of("1x8GiB"), *shapes_of(*QWEN), Wanted())
    _, found, notes = plan("vllm", cluster_of("2x80GiB"), *shapes_of(QWEN[0], "none"), Wanted())
    assert '"ngram"' in str(found[1])
    assert "no draft model" in notes[0]
