"""Standard autoregressive decoding, one token a forward: the baseline that every speedup is measured against."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import count

from ..drafters.base import nothing_drafted
from ..events import Event
from .job import Job
from .report import finished, prefilled, round_events


def standard(job: Job) -> Iterator[Event]:
    """Decode `job` token by token. Yields Started, Prefilled, then a Drafted (empty) and a Verified per token,
    Finished. Closing the generator releases the cache. Exceptions of the model pass through."""
    clock, output, tokens = job.clock(), job.output(), list(job.prompt_ids)
    nothing = nothing_drafted(job.target.device)
    with closing(job.target.open(job.capacity)) as cache:
        yield job.started()
        clock.start()
        for round_index in count():
            with clock.phase("verify"):
                logits = job.feed(cache, tokens, nothing.tokens)  # [1, V]
            with clock.phase("judge"):
                verdict = job.judge(logits, tokens, nothing.tokens, None, round_index)
            texts = output.commit([verdict.extra])
            tokens.append(verdict.extra)
            if job.should_stop():
                texts[-1] += output.cancel()
            if round_index == 0:
                yield from clock.suspended(prefilled(job, clock, verdict, logits, texts))
            else:
                yield from clock.suspended(
                    *round_events(job, clock, round_index, nothing, verdict, logits, texts, (), kept=1)
                )
            if output.finish_reason is not None:
                break
    yield finished(job, clock, output)
