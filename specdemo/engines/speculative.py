"""Speculative decoding (Leviathan et al. 2023; Chen et al. 2023): the loop.

A round is: the drafter proposes K tokens; one target forward gives p at all K + 1 positions; `judge` keeps a beginning
of the draft and draws one token more; both caches forget what was refused. `extend` feeds whatever is committed and not
cached, and rollback is `truncate(len(tokens) - 1)`: so prefill, the catch-up after a fully accepted round and K = 0 are
no special cases. The output is distributed as the target's own, whatever the drafter does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count

from ..drafters.base import Drafter
from ..events import Event
from .draft_length import draft_length_for
from .job import Job
from .report import finished, prefilled, round_events


def speculative(job: Job, make_drafter: Callable[[Job], Drafter]) -> Iterator[Event]:
    """Decode `job` with the drafter that `make_drafter` creates for this run.

    Yields Started, Prefilled, then a Drafted and a Verified per round, Finished. Closing the generator releases the
    caches. Exceptions of the models pass through.
    """
    clock, output, tokens = job.clock(), job.output(), list(job.prompt_ids)
    with closing(job.target.open(job.capacity)) as cache, closing(make_drafter(job)) as drafter:
        yield job.started(drafter.model)
        clock.start()
        draft_length = draft_length_for(job.settings, drafter.cost_ratio)
        with clock.phase("draft"):
            drafter.prefill(tokens)

        for round_index in count():  # round 0 is the prefill: no draft yet, and one token from the target
            with clock.phase("draft"):
                k = min(draft_length.next(), output.remaining - 1) if round_index else 0
                proposal = drafter.propose(tokens, k)
            with clock.phase("verify"):
                logits = job.feed(cache, tokens, proposal.tokens)  # [K + 1, V]
            with clock.phase("judge"):
                verdict = job.judge(logits, tokens, proposal.tokens, proposal.probs, round_index)

            before, n = len(output.ids), verdict.num_accepted
            texts = output.commit(verdict.tokens[:n])
            unused_texts = output.draft_texts(verdict.tokens[len(texts) :])
            texts += output.commit([verdict.extra])
            if job.should_stop():
                texts[-1] += output.cancel()
            kept = max(0, len(output.ids) - before)  # a stop string may have taken back more than this round gave
            tokens[len(job.prompt_ids) :] = output.ids
            cache.truncate(len(tokens) - 1)
            ahead = drafter.observe(tokens)
            draft_length.observe(len(verdict.tokens), n)

            if round_index == 0:
                yield from clock.suspended(prefilled(job, clock, verdict, logits, texts))
            else:
                yield from clock.suspended(
                    *round_events(job, clock, round_index, proposal, verdict, logits, texts, unused_texts, kept, ahead)
                )
            if output.finish_reason is not None:
                break
    yield finished(job, clock, output)
