"""The ways to decode that a user can choose, by name, and how each becomes an engine with a drafter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from .drafters.base import Drafter
from .drafters.draft_model import DraftModel
from .drafters.hybrid import Hybrid
from .drafters.prompt_lookup import PromptLookup
from .engines.job import Job
from .engines.speculative import speculative
from .engines.standard import standard
from .errors import BadRequest
from .events import Event
from .models.base import LanguageModel
from .models.loading import Pair
from .settings import Settings


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
    )
}


def available(pair: Pair) -> list[str]:
    """Names of the methods that run as themselves with this pair."""
    return [name for name, method in METHODS.items() if pair.draft is not None or method.fallback is None]


def resolve(pair: Pair, name: str) -> tuple[Method, tuple[str, ...]]:
    """The method that will really run for `name`, with a note where it is another one. Raises BadRequest."""
    method = METHODS.get(name)
    if method is None:
        raise BadRequest(f"There is no method {name!r}: choose one of {', '.join(METHODS)}.")
    if pair.draft is None and method.fallback is not None:
        note = f"{pair.target.name} has no draft model here, so {method.fallback} runs in place of {name}."
        return METHODS[method.fallback], (note,)
    return method, ()


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
        return DraftModel(draft, job.target, job.settings, job.capacity)

    return make_drafter


def warm_up(pair: Pair, prompt_ids: Sequence[int]) -> None:
    """Run every available method for a few tokens, so that no first timed round pays for what happens once."""
    settings = replace(Settings(), max_new_tokens=4, ignore_eos=True)
    for name in available(pair):
        for _event in run(pair, name, prompt_ids, settings, explain=True):
            pass
