"""What every engine is given, and what engines share: the request, and the small steps that are the same in all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from ..acceptance import Verdict, judge, judge_likeliest
from ..clock import Clock
from ..errors import BadRequest
from ..events import Started
from ..models.base import CachedLM, LanguageModel
from ..sampling import Purpose, penalise, round_salt, to_probs, uniform
from ..settings import Settings
from ..text import TokenText
from .output import Output


@dataclass(frozen=True)
class Job:
    """One run of one lane.

    `explain` adds to the events what only a reader needs (raw probabilities, the likeliest alternatives); the clock
    stands still meanwhile. `should_stop` is asked once a round.
    """

    target: LanguageModel
    text: TokenText
    prompt_ids: Sequence[int]
    settings: Settings
    eos_ids: frozenset[int] = frozenset()
    lane: str = "standard"
    method: str = "standard"
    explain: bool = True
    should_stop: Callable[[], bool] = lambda: False
    notes: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        limit = self.target.context_length
        if not self.prompt_ids:
            raise BadRequest("The prompt has no tokens: type a question or a text to continue.")
        if len(self.prompt_ids) >= limit:
            raise BadRequest(
                f"The prompt has {len(self.prompt_ids)} tokens and the context of {self.target.name} holds {limit}, "
                "answer included: shorten the prompt."
            )

    @property
    def budget(self) -> int:
        """Tokens that may be produced: what was asked for, or what the context leaves."""
        return min(self.settings.max_new_tokens, self.target.context_length - len(self.prompt_ids))

    @property
    def capacity(self) -> int:
        """Cache positions that a run can need: the last token is never fed."""
        return len(self.prompt_ids) + self.budget

    def output(self) -> Output:
        eos_ids = frozenset() if self.settings.ignore_eos else self.eos_ids
        return Output(self.text, eos_ids, self.settings.stop, self.budget)

    def clock(self) -> Clock:
        return Clock(self.target.device)

    def started(self, draft: LanguageModel | None = None) -> Started:
        return Started(
            lane=self.lane,
            t=0.0,
            method=self.method,
            target=self.target.name,
            target_precision=self.target.precision,
            forward_path=self.target.forward_path,
            device=self.target.device.type,
            settings={**asdict(self.settings), "stop": list(self.settings.stop)},  # as JSON gives it back
            prompt_ids=tuple(self.prompt_ids),
            draft=draft.name if draft else None,
            draft_precision=draft.precision if draft else None,
            draft_forward_path=draft.forward_path if draft else None,
            notes=self.notes,
        )

    def feed(self, cache: CachedLM, tokens: Sequence[int], draft: Tensor) -> Tensor:
        """One target forward over what is committed and not cached yet, then the draft. Logits [K + 1, V]."""
        pending = torch.tensor(tokens[cache.cached :], dtype=torch.long, device=draft.device)
        return cache.extend(torch.cat([pending, draft]), keep=draft.shape[0] + 1)

    def judge(
        self, logits: Tensor, tokens: Sequence[int], draft: Tensor, draft_probs: Tensor | None, round_index: int
    ) -> Verdict:
        """Turn the target's logits [K + 1, V] after `tokens` into a verdict, with this run's uniforms."""
        settings, k, length = self.settings, draft.shape[0], len(tokens)
        seen = draft.tolist() if settings.repetition_penalty != 1.0 else ()
        salt = round_salt(settings, round_index)
        tests = [uniform(settings.seed, length + i, Purpose.ACCEPT, salt) for i in range(k)]
        draft = draft.to(logits.device)
        if settings.greedy and draft_probs is None:
            return judge_likeliest(draft, penalise(logits, settings, tokens, seen), tests, settings.verification)
        draws = [uniform(settings.seed, length + i, Purpose.TARGET) for i in range(k + 1)]
        probs = to_probs(logits, settings, tokens, seen)
        return judge(draft, draft_probs, probs, tests, draws, settings.verification)
