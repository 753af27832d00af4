"""Fetching from a hub: how far it is, giving it up, and what goes wrong on the way, with the hub's own client."""

from __future__ import annotations

import io
import time
from typing import TYPE_CHECKING

import huggingface_hub.constants
import pytest
import torch
from test_arena import tiny_pair
from test_bad_models import refused
from tiny_folders import save_folder
from transformers import LlamaForCausalLM

from specdemo.arena import Arena
from specdemo.errors import ModelUnavailable
from specdemo.models.hub import fetch
from specdemo.plan.load import load_fitting
from specdemo.terminal import ProgressBar

if TYPE_CHECKING:
    from hub_stand_in import Hub

pytest_plugins = ["hub_stand_in"]

WEIGHTS = "model.safetensors"


@pytest.fixture
def served(hub: Hub, tiny_target: LlamaForCausalLM) -> Hub:
    """A tiny model on the stand-in, and a file beside it that makes fetching long."""
    save_folder(tiny_target, hub.folder)
    (hub.folder / "LICENSE").write_bytes(b"x" * 2_000_000)
    (hub.folder / "picture.png").write_bytes(b"x")
    return hub


def test_a_fetch_tells_how_far_it_is_and_takes_no_more_than_is_needed(served: Hub) -> None:
    told: list[tuple[str, float]] = []
    folder = fetch("owner/model", lambda text, share: told.append((text, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len({share for share in shares if 0 < share < 1}) > 10
    total = sum(path.stat().st_size for path in served.folder.iterdir() if path.suffix != ".png")
    assert told[-1][0] == f"Fetching owner/model ({total / 1e6:.1f} MB of {total / 1e6:.1f} MB)"
    assert (folder / WEIGHTS).read_bytes() == (served.folder / WEIGHTS).read_bytes()
    assert not (folder / "picture.png").exists()
    told.clear()
    assert fetch("owner/model", lambda text, share: told.append((text, share))) == folder
    assert told == []  # nothing is fetched twice


def test_a_model_of_the_hub_is_loaded_with_its_progress_on_the_command_line(served: Hub) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    pair = load_fitting("owner/model", "owner/model", device="cpu", progress=ProgressBar(screen))
    assert pair.target.name == "owner/model"
    shown = screen.getvalue()
    assert "Fetching owner/model (" in shown
    assert shown.index("Fetching owner/model") < shown.index("Loading owner/model")
    assert pair.plan is not None
    assert pair.plan.fits


def test_a_fetch_given_up_ends_and_leaves_only_whole_files(served: Hub) -> None:
    served.delay = 0.005
    arena = Arena(lambda progress: tiny_pair())
    arena.load()
    thread = arena.start_switching(lambda progress: load_fitting("owner/model", device="cpu", progress=progress))
    until = time.monotonic() + 60
    while not arena.status.message.startswith("Fetching"):
        assert time.monotonic() < until, arena.status
        time.sleep(0.005)
    arena.cancel_loading()
    thread.join(60)
    assert arena.status.message == "Loading was cancelled. The pair before is back: target is ready."
    assert "LICENSE" not in {path.name for path in served.stored}
    served.delay = 0.0
    load_fitting("owner/model", device="cpu")  # what was fetched before is used, the rest is fetched
    assert {path.name for path in served.stored} >= {"LICENSE", WEIGHTS, "config.json"}


@pytest.mark.parametrize(
    ("fault", "says"), [("gated", "hf auth login"), ("unknown", "The hub has no model owner/model")]
)
def test_what_the_hub_answers_is_a_sentence(served: Hub, fault: str, says: str) -> None:
    served.fault = fault
    assert says in refused("--target", "owner/model")
    with pytest.raises(ModelUnavailable, match=says):
        fetch("owner/model")
    assert served.stored == []


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )


def test_no_network_is_a_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable(monkeypatch)
    assert "the hub cannot be reached" in refused("--target", "owner/model")
    with pytest.raises(ModelUnavailable, match="the hub cannot be reached"):
        fetch("owner/model")


def test_a_connection_that_breaks_is_a_sentence_and_half_a_file_is_never_used(served: Hub) -> None:
    served.fault = "cut"
    with pytest.raises(ModelUnavailable) as caught:
        fetch("owner/model")
    assert "owner/model" in str(caught.value)
    assert "LICENSE" not in {path.name for path in served.stored}
    served.fault = ""
    assert (fetch("owner/model") / "LICENSE").stat().st_size == 2_000_000


@pytest.mark.parametrize("fault", ["", "gated", "unknown"])
def test_what_was_fetched_serves_when_the_hub_does_not(
    served: Hub, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = fetch("owner/model")
    served.fault = fault
    if not fault:
        unreachable(monkeypatch)
    assert fetch("owner/model") == folder


def test_half_a_download_is_not_taken_for_a_model(served: Hub) -> None:
    """The weights were never fetched, and now there is no network."""
    folder = fetch("owner/model")
    (folder / WEIGHTS).unlink()
    with pytest.MonkeyPatch.context() as patch:
        unreachable(patch)
        told = refused("--target", "owner/model")
    assert "owner/model" in told


def test_other_errors_are_not_taken_for_the_networks(served: Hub) -> None:
    def fail(_text: str, _share: float) -> None:
        raise ZeroDivisionError("ours")

    with pytest.raises(ZeroDivisionError):
        fetch("owner/model", fail)


def test_tensors_of_a_fetched_model_are_those_of_the_hub(served: Hub, tiny_target: LlamaForCausalLM) -> None:
    pair = load_fitting("owner/model", "none", device="cpu", dtype="float32")
    ids = torch.arange(5, 25)
    with torch.no_grad():
        expected = tiny_target(ids[None]).logits[0, -1]
    assert torch.allclose(pair.target.open(32).extend(ids, keep=1)[0], expected, atol=1e-4)
