"""Rounds rebuilt from what a server tells at the end: how many tokens each of its verify steps drafted and accepted.

An answer is a row of tokens. The first comes from the prompt; then every step wrote its accepted drafts and one token
more, and every step without a draft, of which a server says nothing, wrote one. A step's tokens arrive together, as a
chunk of their own; only where the server was faster than its reader does a chunk hold several steps, and that is tried
when nothing else fits.

With a draft model every step has a draft and only one reading fits. Where a drafter often has no guess (n-gram lookup),
steps that kept nothing and steps that drafted nothing look alike, one token each, and their order is not told: what was
accepted is still certain, where a refused draft fell is not. Then the reading is taken in which drafts come as late as
they can, since a lookup finds more the longer the text is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from .wire import Speculation

MOST_STATES = 2_000_000
"""Of the search; an answer that needs more is shown as it arrived."""


class Unfit(Exception):
    """The server's counts cannot be those of its tokens. The text is half a sentence that says why."""


@dataclass(frozen=True, slots=True)
class Step:
    """Tokens [begin, end) of the answer; of `drafted` tokens the first `accepted` stayed, or would have, had the answer
    not ended among them. `chunk`: index of the chunk in which it came."""

    begin: int
    end: int
    chunk: int
    drafted: int = 0
    accepted: int = 0

    @property
    def kept(self) -> int:
        """Drafted tokens in the answer."""
        return min(self.accepted, self.end - self.begin)

    @property
    def extra(self) -> bool:
        """Whether the step's own token came after them."""
        return self.end - self.begin > self.accepted


def rebuilt(sizes: Sequence[int], told: Speculation) -> tuple[list[Step], bool]:
    """The steps after the first token, in order, and whether no other reading fits. `sizes`: tokens of each chunk, the
    first token included. Raises Unfit."""
    accepted, drafted = _checked(told)
    ends = list(accumulate(sizes))
    total = ends[-1] if ends else 0
    if not total:
        if accepted:
            raise Unfit("it reports steps and sent no tokens")
        return [], True
    for together, cut in ((False, True), (True, False), (True, True)):
        search = _Search(ends, [n + 1 for n in accepted], together, cut)
        ways = search.ways(1, 0)
        if ways == 1 or (ways and not together):
            return search.steps(accepted, drafted), ways == 1
        if ways:
            raise Unfit("its pieces hold several steps each, and more than one reading fits")
    if search.states > MOST_STATES:
        raise Unfit("the answer is too long to be put together again")
    raise Unfit("its steps do not add up to its tokens")


def _checked(told: Speculation) -> tuple[tuple[int, ...], tuple[int, ...]]:
    accepted, drafted = told.accepted, told.drafted
    if accepted is None or drafted is None:
        if told.steps:
            raise Unfit("it does not tell its steps one by one")
        return (), ()
    if len(accepted) != len(drafted) or len(accepted) != told.steps:
        raise Unfit("it tells other numbers of steps in different places")
    if sum(accepted) != told.num_accepted or sum(drafted) != told.num_drafted:
        raise Unfit("its steps do not add up to its totals")
    if any(kept > made for kept, made in zip(accepted, drafted, strict=True)):
        raise Unfit("it accepted more tokens than it drafted")
    return accepted, drafted


class _Search:
    """Where steps of known lengths lie among the tokens. A state is (position, steps placed); a way on is a token of
    its own or the next step, which may be cut by the end of the answer if it is the last one. `together`: whether a
    chunk may hold several steps; `cut`: whether the last step may be cut."""

    def __init__(self, ends: Sequence[int], lengths: Sequence[int], together: bool, cut: bool) -> None:
        self._together, self._cut = together, cut
        self._total = ends[-1]
        self._chunk_of = [0] * self._total
        self._end_of = [0] * self._total
        for chunk, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            for at in range(begin, end):
                self._chunk_of[at], self._end_of[at] = chunk, end
        self._lengths = lengths
        self._placed = [0, *accumulate(lengths)]
        spare = self._total - 1 - self._placed[-1] + (lengths[-1] - 1 if lengths else 0)
        self._spare = spare
        self.states = (spare + 1) * (len(lengths) + 1) if spare >= 0 else 0
        self._ways: dict[tuple[int, int], int] = {}
        if 0 < self.states <= MOST_STATES:
            self._count()

    def ways(self, at: int, step: int) -> int:
        """Readings of the answer from there on; 2 stands for all greater numbers."""
        return self._ways.get((at, step), 0)

    def _count(self) -> None:
        for step in range(len(self._lengths), -1, -1):
            for singles in range(self._spare, -1, -1):
                at = 1 + self._placed[step] + singles
                if at > self._total:
                    continue
                if at == self._total:
                    found = int(step == len(self._lengths) and self._begins(at))
                else:
                    single, end = self._single(at), self._end_after(at, step)
                    found = self.ways(at + 1, step) if single else 0
                    if end is not None:
                        cut = end - at < self._lengths[step]  # then the answer is over
                        found += 1 if cut else self.ways(end, step + 1)
                if found:
                    self._ways[at, step] = min(found, 2)

    def _begins(self, at: int) -> bool:
        """Whether a step may begin there."""
        return self._together or at == self._total or self._end_of[at] != self._end_of[at - 1]

    def _single(self, at: int) -> bool:
        """Whether the token there may be a step without a draft."""
        return self._begins(at) and (self._together or self._end_of[at] == at + 1)

    def _end_after(self, at: int, step: int) -> int | None:
        """Where the next step would end, if it can begin at `at`."""
        if step == len(self._lengths) or not self._begins(at):
            return None
        end = at + self._lengths[step]
        if end == self._end_of[at] or (self._together and end < self._end_of[at]):
            return end
        last = self._cut and step + 1 == len(self._lengths)
        return self._total if last and end > self._total == self._end_of[at] else None

    def steps(self, accepted: Sequence[int], drafted: Sequence[int]) -> list[Step]:
        """The reading in which drafts come late."""
        found, at, step = [], 1, 0
        while at < self._total:
            if self._single(at) and self.ways(at + 1, step):
                found.append(Step(at, at + 1, self._chunk_of[at]))
                at += 1
                continue
            end = self._end_after(at, step)
            assert end is not None
            found.append(Step(at, end, self._chunk_of[at], drafted[step], accepted[step]))
            at, step = end, step + 1
        return found
