"""Saguaro sampling (arXiv 2603.03251): a draft distribution that makes the extra token easier to guess.

After a refusal the extra token comes from the residual norm(max(0, p - q)). Where q holds back on its own likeliest
tokens, the residual falls on just these, which are the ones that get a draft of their own. That costs acceptance and
earns hits. The verification is exact as ever, since it is told the q that was really drawn from.
"""

from __future__ import annotations

from torch import Tensor

from ..settings import Settings


def saguaro(probs: Tensor, settings: Settings) -> Tensor:
    """`probs` float [R, V] with each row's F likeliest tokens scaled by C and renormalised; F is what each position
    gets of the budget where all get the same. Off at C = 1 and at temperature 0."""
    if settings.saguaro == 1.0 or settings.greedy:
        return probs
    count = min(max(1, settings.fan_out_budget // (settings.draft_length + 1)), probs.shape[-1])
    top = probs.topk(count, dim=-1)
    scaled = probs.scatter(-1, top.indices, top.values * settings.saguaro)
    return scaled / scaled.sum(-1, keepdim=True)
