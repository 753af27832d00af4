"""How fast prompt lookup could be on these answers, and how fast it is.

    python bench/lookup_bound.py [--result RESULT.json] [--draft-length 5,16] [--out FILE]

What greedy decoding writes is known beforehand, so it can be counted what any drafter that copies from the text so far
could have gained. Three figures for each category, all as speedup over one token a forward:

oracle   Every occurrence of the last token is a candidate, the one that copies farthest is known in advance, and so is
         the number of tokens after which to stop. Nothing that copies can be faster; nothing can reach it either,
         since it knows the future twice.
latest   The copy must begin behind the latest earlier occurrence of the longest match (8 tokens or fewer), as ours
         does; only where to stop is known in advance. This is the bound that the drafter is held against: it leaves
         out the choice of occurrence, which nothing in the text tells, and keeps the choice of length, which is what a
         policy decides.
drafter  Our drafter, asked at every round, over the known text: what it would gain if its rounds cost exactly what
         their target forwards cost.

A round that drafts k tokens costs what a target forward of k + 1 positions costs: measured by `bench` (--result, a file
that has the method prompt-lookup), else 1 + 0.04 k. Between measured widths the cost is interpolated, beyond them
extrapolated by the mean slope. Where rounds are not divided among drafts optimally a later, longer copy can be missed,
so both bounds are found by dynamic programming over the whole answer. With --result the measured speedup of
prompt-lookup is put beside its bound, prompt by prompt; the answers must be those of the measured run (same model and
precision, same number of tokens).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdemo import methods
from specdemo.drafters.prompt_lookup import LONGEST, PromptLookup
from specdemo.events import Finished
from specdemo.models.loading import Pair, load_pair
from specdemo.settings import Settings
from specdemo.suite import SUITE, SuitePrompt, read_suite
from specdemo.text import encode_prompt

POSITION_COST = 0.04  # where nothing was measured
METHOD = "prompt-lookup"

Cost = Callable[[int], float]
"""Of a round that drafts k tokens, in forwards of one position."""


@dataclass(frozen=True)
class Answer:
    """A prompt and its greedy answer. ids: both, one after the other; the first answer token is the prefill's."""

    id: str
    category: str
    ids: Sequence[int]
    prompt_length: int

    @property
    def first(self) -> int:
        """Index of the first token that a round has to produce."""
        return self.prompt_length + 1


def oracle_length(ids: Sequence[int], at: int, most: int) -> int:
    """Tokens from `at` on that some copy gets right, if it begins behind an earlier occurrence of the last token."""
    return max((_common(ids, start, at, most) for start in range(1, at) if ids[start - 1] == ids[at - 1]), default=0)


def latest_length(ids: Sequence[int], at: int, most: int) -> int:
    """The same for the copy behind the latest earlier occurrence of the longest match."""
    for size in range(min(LONGEST, at - 1), 0, -1):
        for start in range(at - 1, size - 1, -1):
            if ids[start - size : start] == ids[at - size : at]:
                return _common(ids, start, at, most)
    return 0


def _common(ids: Sequence[int], start: int, at: int, most: int) -> int:
    """Tokens in which the text from `start` on and that from `at` on agree. A copy that runs into its own tokens copies
    those, which are the text's as long as they agree."""
    return next((n for n in range(most) if ids[start + n] != ids[at + n]), most)


def bound(answer: Answer, draft_length: int, cost: Cost, length: Callable[[Sequence[int], int, int], int]) -> float:
    """The best speedup of rounds that draft, at each place, at most as many tokens as `length` says are right."""
    ids, end = answer.ids, len(answer.ids)
    least = [0.0] * (end + 1)  # cost of all tokens from an index on
    for at in range(end - 1, answer.first - 1, -1):
        right = length(ids, at, min(draft_length, end - at - 1))
        least[at] = min(cost(k) + least[at + k + 1] for k in range(right + 1))
    return (end - answer.first) / least[answer.first]


def drafter_speedup(answer: Answer, draft_length: int, cost: Cost) -> float:
    """The speedup of our drafter's rounds over the known answer."""
    ids, end, at, spent = answer.ids, len(answer.ids), answer.first, 0.0
    drafter = PromptLookup(torch.device("cpu"))
    drafter.prefill(ids[: answer.prompt_length])
    while at < end:
        drafted = drafter.propose(ids[:at], min(draft_length, end - at - 1)).tokens.tolist()
        kept = next((n for n, token in enumerate(drafted) if token != ids[at + n]), len(drafted))
        spent += cost(len(drafted))
        at += kept + 1
        drafter.observe(ids[:at])
    return (end - answer.first) / spent


def cost_of(verify_cost_by_width: Mapping[str, float | None]) -> Cost:
    """From measured forwards: {"1": 1.0, "2": 1.05, ...} by positions, one more than the drafted tokens."""
    known = sorted((int(width) - 1, value) for width, value in verify_cost_by_width.items() if value)
    points = [(0, 1.0), *((k, value) for k, value in known if k)]
    if len(points) == 1:
        return lambda k: 1.0 + POSITION_COST * k

    def cost(k: int) -> float:
        for (low, at_low), (high, at_high) in pairwise(points):
            if k <= high:
                return at_low + (at_high - at_low) * (k - low) / (high - low)
        last, at_last = points[-1]
        return at_last + (at_last - 1.0) / last * (k - last)

    return cost


def greedy_answers(pair: Pair, prompts: Sequence[SuitePrompt], max_new_tokens: int) -> list[Answer]:
    """The answers of the standard lane, those of two tokens and more."""
    settings = Settings(max_new_tokens=max_new_tokens)
    answers = []
    for prompt in prompts:
        ids = encode_prompt(pair.tokenizer, prompt.prompt)
        *_, last = methods.run(pair, "standard", ids, settings, explain=False)
        assert isinstance(last, Finished)
        if len(last.token_ids) > 1:
            answers.append(Answer(prompt.id, prompt.category, [*ids, *last.token_ids], len(ids)))
        print(f"{prompt.id}: {len(last.token_ids)} tokens", file=sys.stderr, flush=True)
    return answers


def compare(
    answers: Sequence[Answer], draft_length: int, cost: Cost, measured: Mapping[str, float | None]
) -> dict[str, dict[str, float]]:
    """By category, medians over prompts: the three figures, and the shares of `latest` that the drafter and the
    measurement (a speedup by prompt id, where there is one) reach."""
    groups: dict[str, list[dict[str, float]]] = {}
    for answer in answers:
        found = {
            "oracle": bound(answer, draft_length, cost, oracle_length),
            "latest": bound(answer, draft_length, cost, latest_length),
            "drafter": drafter_speedup(answer, draft_length, cost),
        }
        found["drafter_share"] = found["drafter"] / found["latest"]
        if speedup := measured.get(answer.id):
            found |= {"measured": speedup, "measured_share": speedup / found["latest"]}
        groups.setdefault(answer.category, []).append(found)
    return {
        category: {name: median(row[name] for row in rows if name in row) for name in rows[0]}
        for category, rows in groups.items()
    }


def lookup_row(document: Mapping[str, Any], draft_length: int) -> Mapping[str, Any] | None:
    """The measurement of prompt-lookup with this draft length, if the file has it."""
    rows = [row for row in document["results"] if row["method"].partition(":")[0] == METHOD]
    default = document["settings"]["draft_length"]
    return next((row for row in rows if row.get("draft_length", default) == draft_length), None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--result", type=Path, metavar="FILE", help="what bench measured, for costs and speedups")
    parser.add_argument("--draft-length", default="5,16", metavar="K,K", help="(default: 5,16)")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="(default: 96)")
    parser.add_argument("--target", default="embedded", metavar="MODEL")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--suite", type=Path, default=SUITE, metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document to a file")
    options = parser.parse_args(arguments)
    document = json.loads(options.result.read_text(encoding="utf-8")) if options.result else {"results": []}
    pair = load_pair(options.target, "none", options.dtype)
    answers = greedy_answers(pair, read_suite(options.suite), options.max_new_tokens)
    found = {}
    for draft_length in map(int, options.draft_length.split(",")):
        row = lookup_row(document, draft_length)
        cost = cost_of(row["verify_cost_by_width"] if row else {})
        measured = {prompt["id"]: prompt["speedup"] for prompt in row["by_prompt"]} if row else {}
        by_category = compare(answers, draft_length, cost, measured)
        costs = [round(cost(k), 3) for k in range(draft_length + 1)]
        found[str(draft_length)] = {"round_cost": costs, "measured_costs": row is not None, "by_category": by_category}
        print(f"\nK = {draft_length}; a round that drafts 0, 1, ... tokens costs {', '.join(map(str, costs))}")
        for category, figures in by_category.items():
            print(f"  {category:14s}" + "  ".join(f"{name} {value:.2f}" for name, value in figures.items()))
    result = {"target": pair.target.name, "precision": pair.target.precision, "by_draft_length": found}
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print()
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
