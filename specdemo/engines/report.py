"""What a round looked like, as events: fates, probabilities, texts, and what a reader may ask about each token.

Nothing here decides anything; the lane's clock is paused while the softmaxes that only a reader needs are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..acceptance import Verdict
from ..clock import Clock
from ..drafters.base import Ahead, Proposal
from ..events import (
    Candidate,
    Committed,
    Drafted,
    DraftedToken,
    Fate,
    Finished,
    JudgedToken,
    Prefilled,
    Speculation,
    Verified,
)
from ..text import TokenText
from .job import Job
from .output import Output

TOP = 5


class Explanation(NamedTuple):
    """A row of logits read before temperature and filters: the probability of one id, and the likeliest tokens."""

    prob: float | None = None
    top: tuple[Candidate, ...] = ()


def explain(logits: Tensor, ids: Sequence[int], text: TokenText, vocab_ids: Tensor | None = None) -> list[Explanation]:
    """Read each row of `logits` [R, V] at its id in `ids` [R]. `vocab_ids`: the id of each column, if not its index."""
    if not ids:
        return []
    probs = logits.softmax(-1)
    names = torch.arange(probs.shape[-1], device=probs.device) if vocab_ids is None else vocab_ids
    top_probs, top = probs.topk(min(TOP, probs.shape[-1]), dim=-1)
    wanted = names[None, :] == torch.tensor(ids, device=probs.device)[:, None]
    chosen = (probs * wanted).sum(-1).tolist()
    return [
        Explanation(prob, tuple(Candidate(id, p, text.piece(id)) for id, p in zip(row_ids, row_probs, strict=True)))
        for prob, row_ids, row_probs in zip(chosen, names[top].tolist(), top_probs.tolist(), strict=True)
    ]


def prefilled(job: Job, clock: Clock, verdict: Verdict, logits: Tensor, texts: Sequence[str]) -> Prefilled:
    """The event of the prompt's forward. Reads the clock."""
    (explanation,) = _explain_target(job, clock, logits, [0], [verdict.extra])
    seconds = clock.read()
    return Prefilled(
        lane=job.lane,
        t=clock.now,
        target_s=seconds["verify"] + seconds["judge"],
        draft_s=seconds.get("draft", 0.0),
        token=_committed(verdict, "".join(texts), explanation),
    )


def round_events(
    job: Job,
    clock: Clock,
    round_index: int,
    proposal: Proposal,
    verdict: Verdict,
    logits: Tensor,
    texts: Sequence[str],
    unused_texts: Sequence[str],
    kept: int,
    ahead: Ahead | None = None,
) -> tuple[Drafted, Verified]:
    """The events of a round. Reads the clock.

    `logits` [K + 1, V] are the target's. `texts` are what the committed tokens added, `unused_texts` how the rest of
    the draft would have read, `kept` the number of this round's tokens, the extra one included, that stay, `ahead` what
    was drafted for the next round.
    """
    n, k = verdict.num_accepted, len(verdict.tokens)
    draft_texts = [*texts[:n], *unused_texts]
    target_rows = _explain_target(job, clock, logits, [*range(k), n], [*verdict.tokens, verdict.extra])
    draft_rows = _explain_draft(job, clock, proposal, verdict.tokens)
    fates = [_fate(i, n, kept) for i in range(k)]
    seconds = clock.read()
    drafted = Drafted(
        lane=job.lane,
        t=clock.now,
        round=round_index,
        tokens=tuple(
            DraftedToken(id, text, q, row.prob, row.top)
            for id, text, q, row in zip(verdict.tokens, draft_texts, verdict.q, draft_rows, strict=True)
        ),
        draft_s=seconds.get("draft", 0.0),
        origin=proposal.origin,
        draft_forwards=proposal.forwards,
    )
    judged = tuple(
        JudgedToken(
            id=verdict.tokens[i],
            text=draft_texts[i],
            fate=fates[i],
            p=verdict.p[i],
            q=verdict.q[i],
            raw_p=target_rows[i].prob,
            acceptance=verdict.acceptance[i],
            uniform=verdict.tests[i],
            top=target_rows[i].top,
        )
        for i in range(k)
    )
    extra = _committed(verdict, texts[n], target_rows[k]) if kept > n else None
    verified = Verified(
        lane=job.lane,
        t=clock.now,
        round=round_index,
        verify_s=seconds["verify"],
        judge_s=seconds["judge"],
        judged=judged,
        num_accepted=fates.count("accepted"),
        extra=extra,
        extra_kind=verdict.extra_kind if extra else None,
        outcome=(n, verdict.extra) if extra and ahead else None,
        hit=ahead.hit if extra and ahead else None,
        speculation=_with_texts(job, clock, ahead.speculation) if extra and ahead else None,
    )
    return drafted, verified


def finished(job: Job, clock: Clock, output: Output) -> Finished:
    """The lane's last event."""
    assert output.finish_reason is not None
    return Finished(job.lane, clock.now, output.finish_reason, tuple(output.ids), output.text)


def _fate(i: int, num_accepted: int, kept: int) -> Fate:
    if i < min(num_accepted, kept):
        return "accepted"
    if kept <= num_accepted:  # the output ended inside the draft: what follows counts nowhere
        return "clipped"
    return "rejected" if i == num_accepted else "discarded"


def _committed(verdict: Verdict, text: str, explanation: Explanation) -> Committed:
    return Committed(id=verdict.extra, text=text, p=verdict.extra_p, raw_p=explanation.prob, top=explanation.top)


def _with_texts(job: Job, clock: Clock, ahead: Speculation) -> Speculation:
    """The speculation with the texts of its guesses, where it tells them."""
    if not ahead.guesses:
        return ahead
    with clock.paused():
        guesses = []
        for guess in ahead.guesses:
            detokenizer = job.text.detokenizer()
            _, *texts = map(detokenizer.push, (guess.id, *guess.draft))
            draft_text = "".join(texts) + detokenizer.flush()
            guesses.append(replace(guess, text=job.text.piece(guess.id), draft_text=draft_text))
        return replace(ahead, guesses=tuple(guesses))


def _explain_target(
    job: Job, clock: Clock, logits: Tensor, rows: Sequence[int], ids: Sequence[int]
) -> list[Explanation]:
    if not job.explain:
        return [Explanation()] * len(ids)
    with clock.paused():
        return explain(logits[list(rows)], ids, job.text)


def _explain_draft(job: Job, clock: Clock, proposal: Proposal, ids: Sequence[int]) -> list[Explanation]:
    if not job.explain or proposal.logits is None:
        return [Explanation()] * len(ids)
    with clock.paused():
        return explain(proposal.logits, ids, job.text, proposal.vocab_ids)
