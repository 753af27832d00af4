"""SSD with a card for each model: where the models go, that both work at once, and what is said of it.

There are no cards here: see `emulated_cards`. How fast real ones would be is not shown.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_cards import FIRST, GIB, SECOND, Stream, emulate_cards, on_card
from test_ssd import Delayed, verdicts
from tiny import TableLM, letters, outcome, random_table
from tiny_folders import save_folder
from transformers import LlamaForCausalLM

from specdemo import methods
from specdemo.events import Drafted, Event, Started
from specdemo.metrics import fold
from specdemo.models.cuda_graphs import StaticForward
from specdemo.models.lean import LeanLM
from specdemo.models.lean_buffers import LeanBuffers
from specdemo.models.loading import EMBEDDING, Pair
from specdemo.models.reduced_vocab import DraftConfig, write_draft
from specdemo.plan.load import load_fitting
from specdemo.settings import Settings
from specdemo.ssd import card as card_module
from specdemo.ssd.card import CardHelper
from specdemo.trace import check, from_json, to_json

V = 8
PROMPT = [0, 1, 2]
GREEDY = Settings(max_new_tokens=40, draft_length=3, fan_out_budget=4)
SAMPLED = replace(GREEDY, temperature=1.0)


class CardTable(TableLM):
    """A model that is a table, on a card."""

    def __init__(self, table: torch.Tensor, card: torch.device) -> None:
        super().__init__(on_card(table, card), context=2000)
        self.device = card


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    emulate_cards(monkeypatch)
    yield
    assert not [thread for thread in threading.enumerate() if "ssd card" in thread.name]


@pytest.fixture
def target() -> CardTable:
    return CardTable(random_table(0, V), FIRST)


@pytest.fixture
def draft() -> CardTable:
    return CardTable(random_table(0, V) + random_table(5, V, scale=0.8), SECOND)


def run(target: Any, draft: Any, settings: Settings, method: str = "ssd") -> list[Event]:
    pair = Pair(target, draft, tokenizer=None, text=letters(V), eos_ids=frozenset(), target_folder=Path())
    return list(methods.run(pair, method, PROMPT, settings))


def test_tensors_of_two_cards_do_not_mix_here_either() -> None:
    first, second = torch.zeros(2, device=FIRST), torch.zeros(2, device=SECOND)
    for other in (second, torch.zeros(2)):
        with pytest.raises(AssertionError, match="tensors on"):
            first + other
    assert (first + second.to(FIRST)).device == FIRST


# The tokens


@pytest.mark.parametrize(
    "settings",
    [
        GREEDY,
        SAMPLED,
        replace(GREEDY, fan_out="geometric", fallback="prompt-lookup"),
        replace(SAMPLED, top_k=5, repetition_penalty=1.2, adaptive=True),
    ],
    ids=["greedy", "sampled", "with lookup", "with all else"],
)
def test_the_tokens_are_those_of_speculative_decoding(target: CardTable, draft: CardTable, settings: Settings) -> None:
    ours, plain = run(target, draft, settings), run(target, draft, settings, "speculative")
    assert outcome(ours).token_ids == outcome(plain).token_ids
    assert (fold(ours).hit_rate or 0.0) > 0.1
    assert {event.speculation.overlap for event in verdicts(ours) if event.speculation} == {"card"}
    check([from_json(to_json(event)) for event in ours])


def test_the_lane_goes_on_while_the_thread_still_guesses(target: CardTable, draft: CardTable) -> None:
    ours = run(target, Delayed(draft, 0.02), GREEDY)  # type: ignore[arg-type]
    assert outcome(ours).token_ids == outcome(run(target, draft, GREEDY, "speculative")).token_ids
    late = [event.speculation for event in verdicts(ours) if event.speculation]
    assert all(round.known_s >= round.guessed_s >= 0.02 for round in late)


# The times


def test_guesses_are_chosen_before_the_outcome_is_known_and_drafts_are_made_meanwhile(
    target: CardTable, draft: CardTable
) -> None:
    events = run(Delayed(target, 0.2), draft, replace(GREEDY, max_new_tokens=24))  # type: ignore[arg-type]
    ahead = [event.speculation for event in verdicts(events) if event.speculation]
    assert len(ahead) > 5
    for round in ahead:
        assert 0.0 < round.guessed_s < round.known_s
        assert round.guessed_s <= round.built_s
        assert 0.0 <= round.hidden_s <= round.build_s + 1e-9
    assert (fold(events).hidden_share or 0.0) > 0.7  # of little work beside a long verification, on a busy machine too


@pytest.mark.parametrize(
    ("guessed_s", "built_s", "verified_s", "hidden_s", "known_s"),
    [
        (0.002, 0.005, 0.010, 0.004, 0.010),  # all of the tree
        (0.002, 0.013, 0.010, 0.009, 0.010),  # as much of it as the verification lasted
        (0.012, 0.013, 0.010, 0.009, 0.012),  # nothing is told before the guesses are chosen
        (0.002, 0.005, 0.0005, 0.0, 0.002),  # the verification had ended when the tree began
    ],
)
def test_hidden_is_the_part_of_the_tree_that_ran_while_the_target_verified(
    target: CardTable,
    draft: CardTable,
    monkeypatch: pytest.MonkeyPatch,
    guessed_s: float,
    built_s: float,
    verified_s: float,
    hidden_s: float,
    known_s: float,
) -> None:
    helper = CardHelper(draft, target, GREEDY, 40, explain=False)
    helper.prefill(PROMPT)
    helper.speculate([*PROMPT, 3], [1, 2, 3])
    helper._tree.result()
    ready = helper._marks["ready"].at = 5000.0  # by the card's clock, which is not the host's
    for name, seconds in (("begun", 0.001), ("guessed", guessed_s), ("built", built_s)):
        helper._marks[name].at = ready + seconds
    monkeypatch.setattr(card_module.time, "perf_counter", lambda: helper._ready + verified_s)
    told = helper.settle(0, 5).speculation
    monkeypatch.undo()
    helper.close()
    assert told.hidden_s == pytest.approx(hidden_s)
    assert told.build_s == pytest.approx(built_s - 0.001)
    assert (told.guessed_s, told.built_s, told.known_s) == pytest.approx((guessed_s, built_s, known_s))


# Ends


@pytest.mark.parametrize("forward", [1, 3, 7])
def test_a_draft_model_that_fails_in_the_thread_is_the_lanes_error(
    target: CardTable, draft: CardTable, forward: int
) -> None:
    draft.fail_at = forward
    with pytest.raises(RuntimeError, match="the model broke"):
        run(target, draft, GREEDY)
    assert all(cache.closed for lm in (target, draft) for cache in lm.opened)


@pytest.mark.parametrize("forward", [1, 3])
def test_a_target_that_fails_leaves_no_thread(target: CardTable, draft: CardTable, forward: int) -> None:
    target.fail_at = forward
    with pytest.raises(RuntimeError, match="the model broke"):
        run(target, Delayed(draft, 0.01), GREEDY)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_closed_run_leaves_no_thread(target: CardTable, draft: CardTable, after: int) -> None:
    pair = Pair(target, draft, tokenizer=None, text=letters(V), eos_ids=frozenset(), target_folder=Path())
    events = methods.run(pair, "ssd", PROMPT, GREEDY)
    for _ in range(after):
        next(events)
    events.close()  # type: ignore[attr-defined]
    assert all(cache.closed for lm in (target, draft) for cache in lm.opened)


# From the plan to the tokens


@pytest.fixture
def folders(tiny_target: LlamaForCausalLM, tiny_draft: LlamaForCausalLM, tmp_path: Path) -> tuple[str, str]:
    return str(save_folder(tiny_target, tmp_path / "target")), str(save_folder(tiny_draft, tmp_path / "draft"))


def load(folders: tuple[str, str], device: str = "auto") -> Pair:
    pair = load_fitting(*folders, dtype="float32", device=device)
    assert isinstance(pair.target, LeanLM)
    assert isinstance(pair.draft, LeanLM)
    pair.target.graphs = pair.draft.graphs = False  # there is nothing to record them
    return pair


def test_a_machine_with_two_cards_gives_each_model_one_and_says_so(
    folders: tuple[str, str], tiny_target: LlamaForCausalLM
) -> None:
    pair = load(folders)
    assert pair.draft is not None
    assert (pair.target.device, pair.draft.device) == (FIRST, SECOND)
    prompt = list(range(5, 25))
    expected = tiny_target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, 20:].tolist()
    for name in ("standard", "speculative", "hybrid", "ssd"):
        events = list(methods.run(pair, name, prompt, Settings(max_new_tokens=24)))
        assert list(outcome(events).token_ids) == expected
        assert isinstance(events[0], Started)
        assert "The draft model has a card of its own, cuda:1." in events[0].notes
    assert "SSD drafts on cuda:1, a card of its own, while cuda:0 verifies." in events[0].notes
    assert {event.speculation.overlap for event in verdicts(events) if event.speculation} == {"card"}
    assert {event.origin for event in events if isinstance(event, Drafted)} >= {"cache"}


def test_a_distilled_draft_has_its_own_copy_of_the_embeddings(folders: tuple[str, str], tmp_path: Path) -> None:
    target = load(folders).target
    assert isinstance(target, LeanLM)
    config = DraftConfig("t", 1, 32, 48, 4, 2, 8, 1e4, 1e-6, 512, 40, 96)
    stored = LlamaForCausalLM(config.llama()).state_dict()
    layers = {name: weight for name, weight in stored.items() if name not in (EMBEDDING, "lm_head.weight")}
    embeddings = target.embedding.cpu()
    ids = torch.arange(5, 45)
    write_draft(tmp_path / "own", config, layers, ids, torch.zeros(40, 32), torch.zeros(32), embeddings)
    pair = load((folders[0], str(tmp_path / "own")))
    assert isinstance(pair.draft, LeanLM)
    assert pair.draft.embedding.device == SECOND
    events = [list(methods.run(pair, name, [5, 6, 7], Settings(max_new_tokens=24))) for name in ("standard", "ssd")]
    assert outcome(events[0]).token_ids == outcome(events[1]).token_ids


def test_a_card_that_is_named_is_the_only_one(folders: tuple[str, str]) -> None:
    pair = load(folders, "cuda:1")
    assert pair.draft is not None
    assert (pair.target.device, pair.draft.device) == (SECOND, SECOND)
    assert methods.resolve(pair, "ssd")[1] == ("SSD drafts on a second stream of the card that verifies.",)


def test_with_one_card_both_models_share_it(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_cards(monkeypatch, 80 * GIB)
    pair = load(folders)
    assert pair.draft is not None
    assert (pair.target.device, pair.draft.device) == (FIRST, FIRST)
    assert pair.notes == ()


def test_a_target_that_lies_on_the_drafts_card_too_is_not_verified_beside_it(
    target: CardTable, draft: CardTable
) -> None:
    target.devices = frozenset({FIRST, SECOND})  # type: ignore[attr-defined]
    events = run(target, draft, GREEDY)
    assert {event.speculation.overlap for event in verdicts(events) if event.speculation} == {"none"}
    assert outcome(events).token_ids == outcome(run(target, draft, GREEDY, "speculative")).token_ids


def test_a_graph_is_recorded_on_its_models_card(folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Stream] = []

    @contextmanager
    def graph(_graph: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        recorded.append(stream)
        yield

    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(Stream, "wait_stream", lambda _stream, _other: None, raising=False)
    draft = load(folders).draft
    assert isinstance(draft, LeanLM)
    draft.rope.reach(64)
    forward = StaticForward(draft, LeanBuffers(draft, 64), 1)
    assert forward(torch.tensor([5], device=SECOND), 0).device == SECOND
    assert [stream.device for stream in recorded] == [SECOND]
