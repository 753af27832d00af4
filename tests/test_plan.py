"""The ladder rung by rung, what a machine is taken to be, and the command."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli import run

from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.plan import load as plan_load
from specdemo.plan.choose import NO_SECOND_CARD, Plan, Wishes, bars, choose, smaller
from specdemo.plan.devices import Device, Machine, machine_of, system_memory
from specdemo.plan.pairs import best_pair, named, plan_pair, shapes_of
from specdemo.plan.sizes import GIB, embedding_bytes
from specdemo.presets import PRESETS, find

LLAMA = find("llama-3-70b-8b")
QWEN = find("qwen3-8b-0.6b")


def plan(preset: str, memory: str, **wishes: object) -> Plan:
    pair = find(preset)
    return plan_pair(pair.target, pair.draft, machine_of(memory), Wishes(**wishes))  # type: ignore[arg-type]


def precisions(found: Plan) -> tuple[str, str | None]:
    return found.target_kept.precision, found.draft_kept and found.draft_kept.precision


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        ("192GiB", ("bfloat16", "bfloat16")),
        ("141GB", ("int8", "bfloat16")),
        ("80GiB", ("nf4", "bfloat16")),
        ("54GiB", ("nf4", "nf4")),
        ("48GiB", ("nf4", None)),
    ],
)
def test_one_card_walks_down_the_ladder(memory: str, expected: tuple[str, str | None]) -> None:
    found = plan("llama-3-70b-8b", memory)
    assert found.fits
    assert precisions(found) == expected
    assert found.context == 4096
    assert found.is_first == (expected[0] == "bfloat16")
    assert dict(found.device_map) == {"": "cuda:0"}


def test_the_drafter_is_given_up_before_the_context_shrinks() -> None:
    found = plan("llama-3-70b-8b", "42GiB")
    assert found.fits
    assert found.draft is None
    assert found.context < 4096
    assert "draft model is given up" in found.reason
    assert "context shrinks from 4,096" in found.reason


def test_several_cards_share_the_target_and_the_draft_lies_on_one() -> None:
    found = plan("llama-3-70b-8b", "48GiB,48GiB", quantize="int8")
    assert found.fits
    assert set(found.device_map.values()) == {"cuda:0", "cuda:1"}
    order = list(found.device_map.values())
    assert order == sorted(order)  # each device holds one stretch of layers
    assert found.loads["cuda:0"].draft_weights > 0
    assert found.loads["cuda:1"].draft_weights == 0
    whole = found.loads["cuda:0"].target_kv + found.loads["cuda:1"].target_kv
    assert whole == pytest.approx(plan("llama-3-70b-8b", "192GiB").bytes.target_kv, rel=0.07)


@pytest.mark.parametrize(
    ("preset", "memory", "target_on", "draft_on", "says"),
    [
        ("qwen3-8b-0.6b", "cpu=64GiB", {"cpu"}, "cpu", ""),
        ("qwen3-8b-0.6b", "80GiB", {"cuda:0"}, "cuda:0", ""),
        ("qwen3-8b-0.6b", "24GiB,24GiB", {"cuda:0"}, "cuda:1", "a card of its own, cuda:1."),
        ("qwen3-8b-0.6b", "24GiB,24GiB,24GiB", {"cuda:0"}, "cuda:1", "a card of its own, cuda:1."),
        ("qwen3-8b-0.6b", "8GiB,24GiB", {"cuda:1"}, "cuda:0", "a card of its own, cuda:0."),
        ("qwen3-8b-0.6b", "80GiB,1GiB", {"cuda:0"}, "cuda:0", NO_SECOND_CARD),
        ("llama-3-70b-8b", "96GiB,96GiB", {"cuda:0", "cuda:1"}, "cuda:0", ""),
    ],
    ids=["no card", "one", "two", "three", "the larger one is the target's", "no room", "the target needs both"],
)
def test_the_draft_model_has_a_card_of_its_own_where_there_is_one(
    preset: str, memory: str, target_on: set[str], draft_on: str, says: str
) -> None:
    found = plan(preset, memory, **({"quantize": "none"} if len(target_on) > 1 else {}))
    assert found.fits
    assert (set(found.device_map.values()), found.draft_device) == (target_on, draft_on)
    assert {name for name, load in found.loads.items() if load.draft_weights} == {draft_on}
    about_cards = [note for note in found.notes if "draft model" in note]
    assert len(about_cards) == bool(says)
    assert all(note.endswith(says) for note in about_cards)


def test_two_cards_hold_what_one_of_them_would_have_to_make_smaller() -> None:
    found = plan("qwen3-8b-0.6b", "19GiB,4GiB")
    assert precisions(found) == ("bfloat16", "bfloat16")
    assert found.is_first  # nothing had to be given up
    assert precisions(plan("qwen3-8b-0.6b", "19GiB")) == ("int8", "bfloat16")


def test_a_distilled_draft_takes_a_copy_of_the_embeddings_along() -> None:
    one, two = plan("embedded", "8GiB"), plan("embedded", "8GiB,8GiB")
    assert (one.draft_device, two.draft_device) == ("cuda:0", "cuda:1")
    shape = shapes_of("embedded", "auto")[0]
    copied = two.bytes.draft_weights - one.bytes.draft_weights
    assert copied == embedding_bytes(shape, two.target_kept) == shape.vocab * shape.hidden * 2
    assert two.bytes.target_weights == one.bytes.target_weights


def test_layers_in_system_memory_are_said_aloud_with_their_cost() -> None:
    found = plan("llama-3-70b-8b", "24GiB,cpu=256GiB")
    assert found.fits
    assert found.offloaded > 100 * GIB
    assert "every forward copies them" in found.reason
    assert precisions(found) == ("bfloat16", "bfloat16")
    assert plan("llama-3-70b-8b", "80GiB,cpu=256GiB").offloaded == 0  # where quantization is enough, nothing waits


def test_a_refusal_names_the_pair_that_would_fit() -> None:
    found = plan("llama-3-70b-8b", "24GiB")
    assert not found.fits
    assert "does not fit" in found.reason
    assert "qwen3-32b-0.6b would fit" in found.reason
    assert plan("qwen3-32b-0.6b", "24GiB").fits
    assert "None of the named pairs fits" in plan("qwen3-8b-0.6b", "600MiB").reason


def test_what_a_card_cannot_do_is_not_planned_for_it() -> None:
    shapes = shapes_of(QWEN.target, QWEN.draft)
    old = Device("cuda:0", 15 * GIB, 15 * GIB, half="float16", int8=False)
    assert precisions(choose(*shapes, Machine((old,)), Wishes(context=1024))) == ("nf4", "float16")
    new = replace(old, int8=True)
    assert precisions(choose(*shapes, Machine((new,)), Wishes(context=1024))) == ("int8", "float16")
    apple = Device("mps", 15 * GIB, 16 * GIB, half="float16", int8=False, nf4=False)
    assert precisions(choose(*shapes, Machine((apple,)), Wishes(context=1024)))[0] == "float16"


def test_a_processor_has_8_bit_of_its_own_and_float32_where_the_lean_forward_does_not_run() -> None:
    found = plan("smollm2-1.7b-135m", "cpu=5.5GiB")
    assert found.fits
    assert found.target_kept.precision == "int8"
    assert found.target_kept.forward == "lean"
    assert plan("gpt2-xl-distilgpt2", "cpu=16GiB").target_kept.precision == "float32"
    assert plan("gpt2-xl-distilgpt2", "cpu=7GiB").target_kept.precision == "bfloat16"


def test_wishes_are_kept() -> None:
    assert precisions(plan("qwen3-8b-0.6b", "80GiB", quantize="nf4")) == ("nf4", "bfloat16")
    assert not plan("llama-3-70b-8b", "80GiB", quantize="none").fits
    assert precisions(plan("qwen3-8b-0.6b", "80GiB", dtype="float32")) == ("float32", "float32")
    found = plan("gpt2-xl-distilgpt2", "80GiB", context=100_000)
    assert found.context == 1024  # what the model takes


def test_without_bitsandbytes_the_plan_says_so_and_goes_on() -> None:
    found = plan("qwen3-8b-0.6b", "12GiB", obstacle="bitsandbytes is not installed.")
    assert not found.fits
    assert "bitsandbytes is not installed." in found.notes
    assert (
        "bitsandbytes is not installed."
        in plan("qwen3-8b-0.6b", "80GiB", obstacle="bitsandbytes is not installed.").notes
    )


@settings(max_examples=25, deadline=None)
@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=3), context=st.integers(16, 8192))
def test_a_plan_that_fits_leaves_the_margin_on_every_device(sizes: list[int], context: int) -> None:
    machine = machine_of(",".join(f"{size}GiB" for size in sizes))
    found = choose(*shapes_of(QWEN.target, QWEN.draft), machine, Wishes(context=context))
    for device in machine.devices:
        if found.fits and device.name in found.loads:
            assert found.loads[device.name].total <= device.room
    for bar in bars(found):
        used = sum(part["bytes"] for part in bar["parts"])
        assert used == bar["total"] or not found.fits
    more = machine_of(",".join(f"{size + 8}GiB" for size in sizes))
    assert choose(*shapes_of(QWEN.target, QWEN.draft), more, Wishes(context=context)).fits >= found.fits


def test_a_smaller_plan_takes_less_and_there_is_an_end() -> None:
    shapes, machine, wishes = shapes_of(QWEN.target, QWEN.draft), machine_of("80GiB"), Wishes()
    now: Plan | None = choose(*shapes, machine, wishes)
    seen = []
    while now is not None:
        seen.append(now.bytes.total)
        now = smaller(now, *shapes, machine, wishes)
    assert len(seen) > 4
    assert seen == sorted(seen, reverse=True)


# -- machines ----------------------------------------------------------------------------------------------------------


def test_memory_is_read_from_words() -> None:
    machine = machine_of("24GiB, 80GB,cpu=64GiB")
    assert [device.name for device in machine.devices] == ["cuda:0", "cuda:1"]
    assert [device.total for device in machine.devices] == [24 * GIB, 80 * 10**9]
    assert all(device.free < device.total for device in machine.devices)  # a process takes some before any tensor
    assert machine.host is not None
    assert machine.host.total == 64 * GIB
    assert machine_of("cpu=8GiB").devices[0].name == "cpu"
    assert machine_of("24").devices[0].total == 24  # bytes


@pytest.mark.parametrize("words", ["", ",", "much", "-1GiB", "gpu=24GiB", "24GiBs"])
def test_memory_that_is_no_memory_is_one_sentence(words: str) -> None:
    with pytest.raises(BadRequest, match="24GiB"):
        machine_of(words)


@pytest.mark.parametrize("version", [1, 2])
def test_a_container_is_as_large_as_its_limit(tmp_path: Path, version: int) -> None:
    group = tmp_path / ("memory/box/inner" if version == 1 else "box/inner")
    group.mkdir(parents=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    if version == 2:
        names = ("memory.max", "memory.current", "inactive_file")
    (group.parent / names[0]).write_text(f"{512 << 20}\n")  # the limit is the parent's
    (group.parent / names[1]).write_text(f"{300 << 20}\n")
    (group.parent / "memory.stat").write_text(f"cache 1\n{names[2]} {100 << 20}\n")
    (group / names[0]).write_text("max\n")
    own = tmp_path / "own"
    own.write_text("0::/box/inner\n" if version == 2 else "7:memory:/box/inner\n2:cpu:/box\n")
    assert system_memory(tmp_path, own) == ((512 - 300 + 100) << 20, 512 << 20)


def test_without_limits_it_is_the_systems_memory(tmp_path: Path) -> None:
    free, total = system_memory(tmp_path, tmp_path / "none")
    assert 0 < free <= total


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_takes_the_largest_pair_that_fits_and_may_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdemo.plan.pairs.get_token", lambda: None)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    preset, found = best_pair(machine_of("80GiB"), Wishes())
    assert preset.name == "codellama-34b-7b"  # the larger ones are gated
    assert found.fits
    monkeypatch.setattr("specdemo.plan.pairs.get_token", lambda: "a token")
    assert best_pair(machine_of("80GiB"), Wishes())[0].name == "mistral-large-7b"
    assert best_pair(machine_of("64GiB"), Wishes())[0].name == "llama-3.1-70b-8b"
    assert best_pair(machine_of("cpu=64GiB"), Wishes())[0].name == "smollm2-1.7b-360m"  # a processor reads slowly
    assert best_pair(machine_of("cpu=2GiB"), Wishes())[0].name == "embedded"
    with pytest.raises(BadRequest, match="None of the named pairs"):
        best_pair(machine_of("cpu=300MiB"), Wishes())


def test_bitsandbytes_is_asked_for_only_where_it_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def obstacle() -> str:
        asked.append(1)
        return "bitsandbytes is not installed, so 8 and 4 bit are left out."

    monkeypatch.setattr(plan_load, "bitsandbytes_obstacle", obstacle)
    assert plan_load.plan_with_what_works(QWEN.target, QWEN.draft, machine_of("80GiB"), Wishes()).is_first
    assert asked == []
    found = plan_load.plan_with_what_works(QWEN.target, QWEN.draft, machine_of("80GiB"), Wishes(quantize="nf4"))
    assert asked == [1]
    assert precisions(found) == ("bfloat16", "bfloat16")  # it goes on without
    assert any("not installed" in note for note in found.notes)


def test_two_ways_to_name_a_pair_are_one_too_many() -> None:
    assert named("qwen3-8b-0.6b", "embedded", "auto") == (QWEN.target, QWEN.draft)
    with pytest.raises(BadRequest, match="--pair names both"):
        named("qwen3-8b-0.6b", "some/model", "auto")


# -- the command -------------------------------------------------------------------------------------------------------


def test_json_has_the_agreed_form() -> None:
    told = run("plan", "--pair", "llama-3-70b-8b", "--memory", "80GiB", "--json")
    assert told.code == 0
    document = json.loads(told.out)
    assert document["choice"]["target"]["precision"] == "nf4"
    assert document["choice"]["draft"]["precision"] == "bfloat16"
    assert document["choice"]["device_map"] == "cuda:0"
    assert document["fits"] is True
    assert "4 bit" in document["reason"]
    parts = document["bytes"]
    assert set(parts) == {"target_weights", "draft_weights", "target_kv", "draft_kv", "workspace", "total"}
    assert parts["total"] == sum(size for name, size in parts.items() if name != "total")
    assert "accept Meta's licence" in document["access"]


def test_the_table_says_what_goes_where() -> None:
    told = run("plan", "--pair", "qwen3-8b-0.6b", "--memory", "24GiB", "--context", "2048")
    assert told.code == 0
    for words in ("Qwen/Qwen3-8B + Qwen/Qwen3-0.6B, 2,048 positions", "cuda:0", "bfloat16", "total", "kept free"):
        assert words in told.out


def test_every_pair_is_listed_with_what_it_needs() -> None:
    told = run("plan", "--list")
    assert told.code == 0
    listed = json.loads(run("plan", "--list", "--json").out)
    assert [pair["name"] for pair in listed] == list(PRESETS)
    for pair in listed:
        assert pair["name"] in told.out
        assert pair["bytes"]["bfloat16"] > pair["bytes"]["int8"] > pair["bytes"]["nf4"] > 0
        assert (pair["access"] is not None) == pair["gated"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--pair", "nothing"], "no pair 'nothing'"),
        (["--pair", "embedded", "--target", "x/y"], "--pair names both"),
        (["--memory", "lots"], "no size"),
        (["--target", "./nowhere", "--memory", "8GiB"], "no folder"),
        (["--target", "weights.gguf", "--memory", "8GiB"], "single file"),
        (["--device", "warp"], "cannot be used"),
        (["--dtype", "float8", "--memory", "8GiB"], "no dtype 'float8'"),
        (["--context", "0"], "whole number"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], says: str) -> None:
    told = run("plan", *arguments)
    assert told.code == 2
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert says in told.err


@pytest.mark.process
def test_a_plan_for_named_pairs_needs_neither_torch_nor_a_network() -> None:
    code = """
import socket, sys
def no(*arguments, **options): raise OSError("no network here")
socket.socket.connect = no
sys.modules["torch"] = sys.modules["transformers"] = None
from specdemo.cli import main
sys.exit(main(["plan", "--pair", "codellama-34b-7b", "--memory", "48GiB", "--json"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fits"] is True


def test_nothing_is_loaded_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    tight = Machine((Device("cpu", 300 << 20, GIB, half="float32"),))
    monkeypatch.setattr(plan_load, "this_machine", lambda *_arguments, **_options: tight)
    monkeypatch.setattr(plan_load, "load_pair", lambda *_arguments, **_options: pytest.fail("loaded all the same"))
    with pytest.raises(ModelUnavailable, match="does not fit"):
        plan_load.load_fitting(LLAMA.target, LLAMA.draft)
