"""How often SSD guesses how a verification ends, by rule and budget, and how often it could.

    python bench/ssd_recall.py [--draft-length 3,4] [--budget 4,8,16,32] [--answers FILE] [--out FILE]

What greedy decoding writes is known beforehand, so the target is replaced by its known answers and every round costs
only its drafts: the engine, the draft model, the guesses and the cache are the real ones. For each K, rule and budget:

hit_rate   Share of the rounds whose outcome had a draft.
recall     By F: share of the rounds whose extra token was among the draft model's first F choices at its position, the
           drafted token left out. That is the hit rate of F guesses at every position, F (K + 1) in all.
allowed    The recall at F = B / (K + 1), interpolated: what the budget allows where all positions get the same.

With --answers the answers are read from the file, and written there first where it is missing; they take the longest.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lookup_bound import Answer, greedy_answers

from specdemo.drafters.ssd import SSD
from specdemo.engines.job import Job
from specdemo.engines.speculative import speculative
from specdemo.events import Event
from specdemo.metrics import Fold, Metrics
from specdemo.models.base import LanguageModel
from specdemo.models.loading import Pair, load_pair
from specdemo.settings import Settings
from specdemo.ssd.helper import LocalHelper
from specdemo.suite import SUITE, read_suite

CATEGORIES = ("chat", "code", "grounded")
RULES = ("likeliest", "geometric", "uniform")


class KnownTarget:
    """A language model that continues one known text, whatever it is fed. Everything else is that of `model`."""

    def __init__(self, model: LanguageModel, ids: Sequence[int]) -> None:
        self.name, self.precision, self.forward_path = model.name, model.precision, "known"
        self.device, self.dtype, self.vocab_size, self.vocab_ids = model.device, model.dtype, model.vocab_size, None
        self.context_length = model.context_length
        self.ids = torch.tensor(ids)

    def open(self, capacity: int) -> KnownCache:
        return KnownCache(self)


class KnownCache:
    def __init__(self, target: KnownTarget) -> None:
        self._target = target
        self.cached = 0

    def extend(self, ids: Tensor, keep: int) -> Tensor:
        self.cached += len(ids)
        following = torch.arange(self.cached - keep + 1, self.cached + 1).clamp_(max=len(self._target.ids) - 1)
        logits = torch.zeros(keep, self._target.vocab_size)
        return logits.scatter_(1, self._target.ids[following][:, None], 10.0)

    def truncate(self, length: int) -> None:
        self.cached = min(self.cached, length)

    def close(self) -> None:
        self.cached = 0


def rounds_of(pair: Pair, answer: Answer, settings: Settings) -> list[Event]:
    """The events of SSD writing a known answer."""
    assert pair.draft is not None
    draft, target = pair.draft, KnownTarget(pair.target, answer.ids)
    job = Job(target, pair.text, answer.ids[: answer.prompt_length], settings, method="ssd", explain=False)

    def make_drafter(job: Job) -> SSD:
        return SSD(LocalHelper(draft, target, settings, job.capacity, False), draft, target, settings)

    return list(speculative(job, make_drafter))


def measure(pair: Pair, answers: Sequence[Answer], settings: Settings) -> Metrics:
    """Metrics over the rounds of all answers."""
    folded = Fold()
    for answer in answers:
        for event in rounds_of(pair, answer, _of_length(settings, len(answer.ids) - answer.prompt_length)):
            if event.type in ("drafted", "verified"):
                folded.add(event)
    return folded.metrics()


def _of_length(settings: Settings, tokens: int) -> Settings:
    return Settings(
        max_new_tokens=tokens,
        ignore_eos=True,
        draft_length=settings.draft_length,
        fan_out=settings.fan_out,
        fan_out_budget=settings.fan_out_budget,
    )


def allowed(recall: Sequence[tuple[int, float]], fan_out: float) -> float:
    """The recall at a fan-out between two that were counted."""
    points = [(0.0, 0.0), *recall]
    for (low, at_low), (high, at_high) in pairwise(points):
        if fan_out <= high:
            return at_low + (at_high - at_low) * (fan_out - low) / (high - low)
    return points[-1][1]


def row(metrics: Metrics, settings: Settings) -> dict[str, Any]:
    bound = allowed(metrics.recall_by_fan_out, settings.fan_out_budget / (settings.draft_length + 1))
    hit_rate = metrics.hit_rate or 0.0
    return {
        "draft_length": settings.draft_length,
        "fan_out": settings.fan_out,
        "fan_out_budget": settings.fan_out_budget,
        "rounds": metrics.rounds,
        "hit_rate": round(hit_rate, 4),
        "allowed": round(bound, 4),
        "share_of_allowed": round(hit_rate / bound, 3) if bound else None,
        "recall_by_fan_out": {str(fan_out): round(share, 4) for fan_out, share in metrics.recall_by_fan_out},
        "tokens_on_hit": round(metrics.tokens_on_hit or 0.0, 3),
        "tokens_on_miss": round(metrics.tokens_on_miss or 0.0, 3),
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
        for budget in map(int, options.budget.split(",")):
            for rule in RULES:
                settings = Settings(draft_length=draft_length, fan_out=rule, fan_out_budget=budget)  # type: ignore[arg-type]
                rows.append(row(measure(pair, answers, settings), settings))
                print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
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
