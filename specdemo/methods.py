"""The ways to decode that a user can choose, by name, and how each becomes an engine with a drafter."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .drafters.base import Drafter
from .drafters.draft_model import DraftModel
from .drafters.hybrid import Hybrid
from .drafters.prompt_lookup import PromptLookup
from .drafters.ssd import SSD
from .engines.job import Job
from .engines.speculative import speculative
from .engines.standard import standard
from .errors import BadRequest
from .events import Event
from .models.base import LanguageModel, can_branch, devices_of
from .models.loading import Pair
from .settings import Settings
from .ssd.card import CardHelper
from .ssd.helper import Helper, LocalHelper, ProcessHelper, drafts_beside
from .ssd.stream import StreamHelper


@dataclass(frozen=True, slots=True)
class Method:
    """A way to decode. `fallback` is what runs instead where there is no draft model; None: no draft model needed."""

    name: str
    title: str
    fallback: str | None = None


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("standard", "Standard decoding"),
        Method("speculative", "Speculative decoding (draft model)", fallback="prompt-lookup"),
        Method("prompt-lookup", "Prompt lookup"),
        Method("hybrid", "Hybrid: lookup, else draft model", fallback="prompt-lookup"),
        Method("ssd", "SSD: draft the next round during verification", fallback="prompt-lookup"),
    )
}


def available(pair: Pair) -> list[str]:
    """Names of the methods that run as themselves with this pair."""
    return [name for name in METHODS if resolve(pair, name)[0].name == name]


def resolve(pair: Pair, name: str) -> tuple[Method, tuple[str, ...]]:
    """The method that will really run for `name`, with a note where it is another one. Raises BadRequest."""
    method = METHODS.get(name)
    if method is None:
        raise BadRequest(f"There is no method {name!r}: choose one of {', '.join(METHODS)}.")
    if pair.draft is None and method.fallback is not None:
        note = f"{pair.target.name} has no draft model here, so {method.fallback} runs in place of {name}."
        return METHODS[method.fallback], (note,)
    if name == "ssd" and pair.draft is not None:
        return _resolve_ssd(pair.target, pair.draft)
    return method, ()


def _resolve_ssd(target: LanguageModel, draft: LanguageModel) -> tuple[Method, tuple[str, ...]]:
    if not can_branch(draft):
        return METHODS["speculative"], (
            f"{draft.name} cannot draft for several outcomes at once here ({draft.forward_path}), "
            "so speculative runs in place of ssd.",
        )
    if _on_one_card(target, draft):
        return METHODS["ssd"], ("SSD drafts on a second stream of the card that verifies.",)
    if _on_own_card(target, draft):
        return METHODS["ssd"], (f"SSD drafts on {draft.device}, a card of its own, while {target.device} verifies.",)
    if not drafts_beside(target, draft):
        return METHODS["ssd"], ("SSD drafts before each verification and not beside it: that needs Linux and a CPU.",)
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        return METHODS["ssd"], (
            "SSD has one processor here for both models, so they take turns and nothing is gained.",
        )
    note = f"While SSD verifies, the target has {cores - 1} of {cores} processors and the drafting process the other."
    return METHODS["ssd"], (note,)


def run(
    pair: Pair,
    name: str,
    prompt_ids: Sequence[int],
    settings: Settings,
    lane: str | None = None,
    explain: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Event]:
    """The events of decoding `prompt_ids` by the method `name`. Raises BadRequest before the first event."""
    method, notes = resolve(pair, name)
    job = Job(
        target=pair.target,
        text=pair.text,
        prompt_ids=tuple(prompt_ids),
        settings=settings,
        eos_ids=pair.eos_ids,
        lane=lane or name,
        method=method.name,
        explain=explain,
        should_stop=should_stop,
        notes=(*pair.notes, *notes),
    )
    if method.name == "standard":
        return standard(job)
    return speculative(job, _drafter_factory(method, pair.draft))


def _drafter_factory(method: Method, draft: LanguageModel | None) -> Callable[[Job], Drafter]:
    def make_drafter(job: Job) -> Drafter:
        if method.name == "prompt-lookup" or draft is None:
            return PromptLookup(job.target.device)
        if method.name == "hybrid":
            return Hybrid(draft, job.target, job.settings, job.capacity)
        if method.name == "ssd":
            return SSD(_start_helper(job, draft), draft, job.target, job.settings)
        return DraftModel(draft, job.target, job.settings, job.capacity)

    return make_drafter


def _on_one_card(target: LanguageModel, draft: LanguageModel) -> bool:
    return target.device == draft.device and target.device.type == "cuda"


def _on_own_card(target: LanguageModel, draft: LanguageModel) -> bool:
    """Both on cards, and no layer of the target on the draft model's."""
    return target.device.type == draft.device.type == "cuda" and draft.device not in devices_of(target)


def _start_helper(job: Job, draft: LanguageModel) -> Helper:
    """Where SSD drafts while the target verifies."""
    kind: type[ProcessHelper | LocalHelper] = LocalHelper
    if drafts_beside(job.target, draft):
        kind = ProcessHelper
    elif _on_one_card(job.target, draft):
        kind = StreamHelper
    elif _on_own_card(job.target, draft):
        kind = CardHelper
    return kind(draft, job.target, job.settings, job.capacity, job.explain)


def warm_up(pair: Pair, prompt_ids: Sequence[int]) -> None:
    """Run every available method for a few tokens, so that no first timed round pays for what happens once."""
    settings = replace(Settings(), max_new_tokens=4, ignore_eos=True)
    for name in available(pair):
        for _event in run(pair, name, prompt_ids, settings, explain=True):
            pass
