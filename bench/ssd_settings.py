"""Which setting of SSD pays on this machine, against speculative decoding with the same draft length.

    python bench/ssd_settings.py [--dtype float16,int8] [--settings 4x8,2x4,4x8+lookup] [--limit N] [--out FILE]

A setting is K x B, draft length times fan-out budget, and `+lookup` where a missed round asks prompt lookup before the
draft model. Each prompt is decoded by all three methods, one after the other, and what is compared are their speeds on
that prompt. Of every setting, as medians over the prompts:

ratio          SSD's tokens per second over those of speculative decoding; also the least and the greatest.
speculative    Speculative decoding's over standard decoding's: what SSD has to beat.
hit_rate       Share of the rounds whose outcome had a draft ready.
build_ms       Making the drafts, beside the verification, and known_ms, when its outcome was known, from the moment
               when the draft went to the target; of all rounds.
verify_cost    A verification in forwards of one position, and beside it that of speculative decoding.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdemo.environment import describe
from specdemo.events import Event, Finished, Verified
from specdemo.methods import run
from specdemo.metrics import Metrics, fold, with_baseline
from specdemo.models.loading import AUTO, EMBEDDED, Pair, load_pair
from specdemo.settings import Settings
from specdemo.suite import SUITE, SuitePrompt, read_suite
from specdemo.text import encode_prompt

CATEGORIES = ("chat", "code", "grounded")


@dataclass(frozen=True)
class Outcome:
    """One prompt under one setting."""

    standard: Metrics
    speculative: Metrics
    ssd: Metrics
    rounds: Sequence[tuple[float, float]]  # build_s and known_s of each that drafted ahead
    same_text: bool

    @property
    def ratio(self) -> float:
        return _over(self.ssd, self.speculative)


def settings_of(name: str, max_new_tokens: int) -> Settings:
    """The settings that a name such as `4x8` or `4x8+lookup` stands for."""
    sizes, _, fallback = name.partition("+")
    draft_length, budget = map(int, sizes.split("x"))
    return Settings(
        max_new_tokens=max_new_tokens,
        temperature=0.0,
        draft_length=draft_length,
        fan_out_budget=budget,
        fallback="prompt-lookup" if fallback == "lookup" else "draft-model",
    )


def decode(pair: Pair, prompt: SuitePrompt, settings: Settings) -> Outcome:
    """The prompt by all three methods."""
    ids = encode_prompt(pair.tokenizer, prompt.prompt)
    standard, speculative, ssd = (
        list(run(pair, method, ids, settings)) for method in ("standard", "speculative", "ssd")
    )
    baseline = fold(standard)
    ahead = [event.speculation for event in ssd if isinstance(event, Verified) and event.speculation]
    return Outcome(
        baseline,
        with_baseline(fold(speculative), baseline),
        with_baseline(fold(ssd), baseline),
        [(each.build_s, each.known_s) for each in ahead],
        _text(speculative) == _text(ssd),
    )


def row(name: str, precision: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What a setting came to."""
    ratios = [outcome.ratio for outcome in outcomes]
    rounds = [each for outcome in outcomes for each in outcome.rounds]
    return {
        "setting": name,
        "precision": precision,
        "ratio": round(median(ratios), 3),
        "ratio_least": round(min(ratios), 3),
        "ratio_greatest": round(max(ratios), 3),
        "speculative": round(median(_over(each.speculative, each.standard) for each in outcomes), 3),
        "hit_rate": _median(each.ssd.hit_rate for each in outcomes),
        "build_ms": _median(1000.0 * build_s for build_s, _ in rounds),
        "known_ms": _median(1000.0 * known_s for _, known_s in rounds),
        "verify_cost": _median(each.ssd.verify_cost for each in outcomes),
        "verify_cost_speculative": _median(each.speculative.verify_cost for each in outcomes),
        "same_texts": sum(each.same_text for each in outcomes),
        "prompts": len(outcomes),
    }


def _over(one: Metrics, other: Metrics) -> float:
    assert one.tokens_per_second
    assert other.tokens_per_second
    return one.tokens_per_second / other.tokens_per_second


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 3) if known else None


def _text(events: Sequence[Event]) -> str:
    last = events[-1]
    assert isinstance(last, Finished)
    return last.text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=EMBEDDED, metavar="MODEL")
    parser.add_argument("--draft", default=AUTO, metavar="MODEL")
    parser.add_argument("--dtype", default="auto", metavar="P,P", help="precisions, one after the other")
    parser.add_argument(
        "--settings", default="4x8,3x6,2x4,1x4", metavar="KxB,KxB+lookup", help="(default: %(default)s)"
    )
    parser.add_argument("--suite", type=Path, default=SUITE, metavar="FILE")
    parser.add_argument("--categories", default=",".join(CATEGORIES), metavar="C,C", help="(default: %(default)s)")
    parser.add_argument("--limit", type=int, default=2, metavar="N", help="prompts of each category (default: 2)")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="(default: 64)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document to a file")
    options = parser.parse_args(arguments)
    prompts = read_suite(options.suite, options.categories.split(","), options.limit)
    rows: list[dict[str, Any]] = []
    for dtype in options.dtype.split(","):
        pair = load_pair(options.target, options.draft, dtype)
        decode(pair, prompts[0], settings_of("2x2", 8))  # what is done once is done here
        for name in options.settings.split(","):
            settings = settings_of(name, options.max_new_tokens)
            rows.append(row(name, pair.target.precision, [decode(pair, prompt, settings) for prompt in prompts]))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    result = {
        "environment": describe(pair.target.device),
        "target": pair.target.name,
        "max_new_tokens": options.max_new_tokens,
        "rows": rows,
    }
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
