"""A scripted race in which SSD runs beside both that it is measured against, for tests of what is made of it."""

from __future__ import annotations

from dataclasses import replace

from fake_lanes import Script, interleaved
from race_logs import explained

from specdemo.events import Drafted, Event, Guess, Speculation, Started, Verified

K = 3


def guess(kept: int, rank: int, text: str, draft: str, taken: bool = False) -> Guess:
    return Guess(kept, 100 * kept + rank, rank, text, tuple(range(len(draft.split()))), draft, taken)


def cache(guesses: tuple[Guess, ...], rank: int | None, built_s: float, known_s: float) -> Speculation:
    """A cache that took `built_s`; the outcome was known after `known_s`."""
    fan_out = tuple(sum(guess.num_accepted == kept for guess in guesses) for kept in range(K + 1))
    return Speculation(
        fan_out=fan_out,
        rank=rank,
        guessed_s=0.002,
        built_s=built_s,
        known_s=known_s,
        build_s=built_s,
        hidden_s=min(built_s, known_s),
        overlap="process",
        guesses=guesses,
    )


def ssd_story(other: str = " other", settings: dict[str, object] | None = None, pass_s: float = 0.02) -> list[Event]:
    """Three lanes that write "A b c d e f g h i": standard in steps of 30 ms, speculative in rounds of 34 ms, SSD in
    rounds of 2 ms more than `pass_s`.

    The SSD lane: b ✗x ·y → c, which was guessed (hit); then d e f → g, not guessed (miss); then h → i, the end. `other`
    is the likeliest alternative everywhere, and the text of one of the guesses.
    """
    chosen = settings or {}
    standard = Script("standard", seconds_a_round=0.03, settings=chosen).start().first("A")
    for word in (" b", " c", " d", " e", " f", " g", " h", " i"):
        standard.round(extra=word)
    lanes = [standard]
    for lane, seconds in (("speculative", 0.034), ("ssd", pass_s + 0.002)):
        script = Script(lane, seconds_a_round=seconds, settings=chosen).start().first("A")
        script.round([(" b", "accepted"), (" x", "rejected"), (" y", "discarded")], " c", "recovered")
        script.round([(" d", "accepted"), (" e", "accepted"), (" f", "accepted")], " g", "bonus")
        script.round([(" h", "accepted"), (" z", "rejected"), (" z", "discarded")], " i", "recovered")
        lanes.append(script)
    return [drafted(explained(event, other), other) for event in interleaved(*[lane.finish() for lane in lanes])]


def drafted(event: Event, other: str) -> Event:
    """The same event by a draft model, in turns or ahead of its time."""
    match event:
        case Started(lane="speculative"):
            return replace(event, method="speculative")
        case Drafted(lane="speculative", tokens=tokens):
            return replace(event, origin="model", draft_forwards=len(tokens))
    return ahead(event, other) if event.lane == "ssd" else event


def ahead(event: Event, other: str) -> Event:
    """An event of the SSD lane with what was drafted beside it."""
    caches = {
        1: cache(
            (
                guess(0, 0, " B", " one two"),
                guess(1, 0, other, " d"),
                guess(1, 1, " c", " d e f", taken=True),
                guess(3, 0, " y", ""),
            ),
            rank=1,
            built_s=0.012,
            known_s=0.02,
        ),
        2: cache((guess(0, 0, other, other), guess(3, 0, " k", " l m")), rank=5, built_s=0.025, known_s=0.02),
    }
    match event:
        case Drafted(round=number, tokens=tokens):
            forwards = 0 if number == 2 else len(tokens)
            origin = "cache" if number == 2 else "model"
            return replace(event, origin=origin, draft_forwards=forwards, draft_s=0.0002 if number == 2 else 0.001)
        case Verified(round=number, extra=extra) if number in caches and extra is not None:
            built = caches[number]
            guesses = tuple(replace(guess, id=extra.id) if guess.taken else guess for guess in built.guesses)
            outcome = event.num_accepted, extra.id
            return replace(event, outcome=outcome, hit=number == 1, speculation=replace(built, guesses=guesses))
    return event
