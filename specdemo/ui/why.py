"""Why each token of a round is what it is: what a reader who asks is told, as one record of the page's log.

    why   n: round (0 is the prefill), o: where the draft came from,
          j: for each drafted token [p, q, raw p, raw q, acceptance probability, draw, target's top, drafter's top],
          x: of the extra token [p, raw p, target's top],
          r: of a recovered token at a temperature above 0 the residual it was drawn from, before temperature and
             filters: [[text, p, q, least, most], ...], where p - q lies between least and most because q is only known
             of the drafter's likeliest tokens

A top is [[text, raw probability], ...]. Probabilities have three significant digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..events import Candidate, Committed, Drafted, DraftedToken, Prefilled, Verified
from .records import significant


def why_first(event: Prefilled) -> dict[str, Any]:
    """The token of the prompt's forward."""
    return {"n": 0, "x": _drawn(event.token)}


def why_round(drafted: Drafted, verified: Verified, residual: bool) -> dict[str, Any]:
    """All tokens of a round. `drafted` is the round's own; `residual`: whether a recovered token was drawn from p - q,
    which it is under token-wise verification above temperature 0."""
    fields: dict[str, Any] = {"n": verified.round}
    if verified.judged:
        fields["o"] = drafted.origin
        fields["j"] = [
            [
                *map(_prob, (judged.p, judged.q, judged.raw_p, token.raw_q, judged.acceptance, judged.uniform)),
                _top(judged.top),
                _top(token.top),
            ]
            for judged, token in zip(verified.judged, drafted.tokens, strict=True)
        ]
    if verified.extra is not None:
        fields["x"] = _drawn(verified.extra)
        if verified.extra_kind == "recovered" and residual:
            fields["r"] = _residual(verified.extra, drafted.tokens[verified.num_accepted])
    return fields


def _residual(recovered: Committed, refused: DraftedToken) -> list[list[Any]]:
    """norm(max(0, p - q)) without the norm, over the target's likeliest tokens."""
    known = {candidate.id: candidate.prob for candidate in refused.top}
    rows = []
    for candidate in recovered.top:
        p, q = candidate.prob, known.get(candidate.id)
        if not known:  # a drafter that drew nothing was certain of its token
            q = float(candidate.id == refused.id)
        # outside the drafter's likeliest tokens q is at most the least of theirs
        least_q, most_q = (0.0, min(known.values())) if q is None else (q, q)
        rows.append([candidate.text, *map(_prob, (p, q, max(0.0, p - most_q), max(0.0, p - least_q)))])
    return rows


def _drawn(token: Committed) -> list[Any]:
    return [_prob(token.p), _prob(token.raw_p), _top(token.top)]


def _top(candidates: Sequence[Candidate]) -> list[list[Any]]:
    return [[candidate.text, _prob(candidate.prob)] for candidate in candidates]


def _prob(value: float | None) -> float | None:
    return significant(value, 3)
