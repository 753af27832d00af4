"""How often SSD guesses how a verification ends, by rule and budget, and how often it could.

    python bench/ssd_recall.py [--draft-length 3,4] [--budget 4,8,16,32] [--answers FILE] [--out FILE]

What greedy decoding writes is known beforehand, so the target is not needed: the draft model drafts along the known
answers, and at each verdict every rule and budget is asked which outcomes it would have drafted for. For each of them:

hit_rate   Share of the rounds whose outcome would have had a draft.
recall     By F: share of the rounds whose extra token was among the draft model's first F choices at its position, the
           drafted token left out. That is the hit rate of F guesses at every position, F (K + 1) in all.
allowed    The recall at F = B / (K + 1), interpolated: what the budget allows where all positions get the same.

With --answers the answers are read from the file, and written there first where it is missing; they take the longest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lookup_bound import Answer, greedy_answers

from specdemo.hits import FAN_OUTS
from specdemo.models.loading import Pair, load_pair
from specdemo.settings import FanOut, Settings
from specdemo.ssd.speculator import Speculator
from specdemo.suite import SUITE, read_suite

CATEGORIES = ("chat", "code", "grounded")


@dataclass
class Found:
    """Of one K: rounds, tokens they gave, hits by (rule, budget) and ranks of the extra tokens."""

    rounds: int = 0
    tokens: int = 0
    hits: Counter[Settings] = field(default_factory=Counter)
    ranks: Counter[int] = field(default_factory=Counter)

    def recall(self, fan_out: int) -> float:
        return sum(count for rank, count in self.ranks.items() if rank < fan_out) / self.rounds


def follow(pair: Pair, answer: Answer, asked: Sequence[Settings], found: Found) -> None:
    """Draft along a known answer and count what each of `asked`, which differ in rule and budget, would have hit."""
    assert pair.draft is not None
    ids, at, k = list(answer.ids), answer.first, asked[0].draft_length
    speculator = Speculator(pair.draft, pair.target, asked[0], len(ids) + k)
    speculator.prefill(ids[: answer.prompt_length])
    while len(ids) - at > 1:
        tokens = ids[:at]
        speculator.observe(tokens)
        draft = speculator.propose(tokens, min(k, len(ids) - at - 1)).tokens.tolist()
        kept = next((n for n, token in enumerate(draft) if token != ids[at + n]), len(draft))
        read = speculator.read(tokens, draft)
        outcome = kept, ids[at + kept]
        for settings in asked:
            guesses = speculator.choose_guesses(*read, settings)
            found.hits[settings] += outcome in zip(guesses.num_accepted.tolist(), guesses.id.tolist(), strict=True)
        ranked = read[0][kept].tolist()
        rank = ranked.index(outcome[1]) if outcome[1] in ranked else len(ranked)
        speculator.experience.learn(kept, len(draft), rank)
        found.ranks[rank] += 1
        found.rounds += 1
        found.tokens += kept + 1
        at += kept + 1
    speculator.close()


def allowed(recall: Sequence[tuple[int, float]], fan_out: float) -> float:
    """The recall at a fan-out between two that were counted."""
    points = [(0.0, 0.0), *recall]
    for (low, at_low), (high, at_high) in pairwise(points):
        if fan_out <= high:
            return at_low + (at_high - at_low) * (fan_out - low) / (high - low)
    return points[-1][1]


def row(found: Found, settings: Settings) -> dict[str, Any]:
    recall = [(fan_out, found.recall(fan_out)) for fan_out in FAN_OUTS]
    bound = allowed(recall, settings.fan_out_budget / (settings.draft_length + 1))
    hit_rate = found.hits[settings] / found.rounds
    return {
        "draft_length": settings.draft_length,
        "fan_out": settings.fan_out,
        "fan_out_budget": settings.fan_out_budget,
        "rounds": found.rounds,
        "tokens_a_round": round(found.tokens / found.rounds, 3),
        "hit_rate": round(hit_rate, 4),
        "allowed": round(bound, 4),
        "share_of_allowed": round(hit_rate / bound, 3) if bound else None,
        "recall_by_fan_out": {str(fan_out): round(share, 4) for fan_out, share in recall},
    }


def known_answers(pair: Pair, path: Path | None, max_new_tokens: int) -> list[Answer]:
    if path and path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        return [Answer(**json.loads(line)) for line in lines]
    answers = greedy_answers(pair, read_suite(SUITE, CATEGORIES), max_new_tokens)
    if path:
        path.write_text("".join(json.dumps(vars(answer)) + "\n" for answer in answers), encoding="utf-8")
    return answers


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-length", default="3,4", metavar="K,K", help="(default: 3,4)")
    parser.add_argument("--budget", default="4,8,16,32", metavar="B,B", help="(default: 4,8,16,32)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="(default: 96)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="the greedy answers, kept for another time")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document to a file")
    options = parser.parse_args(arguments)
    pair = load_pair(dtype=options.dtype)
    answers = known_answers(pair, options.answers, options.max_new_tokens)
    rows = []
    for draft_length in map(int, options.draft_length.split(",")):
        base, found = Settings(draft_length=draft_length), Found()
        budgets = [int(budget) for budget in options.budget.split(",")]
        asked = [replace(base, fan_out=rule, fan_out_budget=b) for b in budgets for rule in get_args(FanOut)]
        for answer in answers:
            follow(pair, answer, asked, found)
        rows += [row(found, settings) for settings in asked]
    for each in rows:
        print("  ".join(f"{name} {value}" for name, value in each.items()))
    result = {
        "target": pair.target.name,
        "precision": pair.target.precision,
        "prompts": len(answers),
        "max_new_tokens": options.max_new_tokens,
        "categories": list(CATEGORIES),
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
