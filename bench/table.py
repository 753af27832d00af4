"""The tables of a README from a result file of `bench`, so that no figure is typed by hand.

    python bench/table.py RESULT.json [--categories chat,code,grounded] [--against METHOD]

The first table: how many times as fast as the standard lane each method is (or as METHOD), as the median over prompts
with the quartiles in brackets, over all chosen categories and for each. The second: what became of the drafts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

Row = Mapping[str, Any]


def speedup_table(rows: Sequence[Row], categories: Sequence[str], against: str) -> str:
    """Markdown; a cell is "median (first quartile to third)" over the prompts of a category."""
    standard = rows[0]["precision"]
    base = {prompt["id"]: prompt["speedup"] for prompt in row_of(rows, against)["by_prompt"]}
    lines = []
    for row in rows:
        ratios: dict[str, list[float]] = {name: [] for name in categories}
        for prompt in row["by_prompt"]:
            own, other = prompt["speedup"], base[prompt["id"]]
            if prompt["category"] in ratios and own and other:
                ratios[prompt["category"]].append(own / other)
        everything = [ratio for group in ratios.values() for ratio in group]
        lines.append([_label(row, standard), _spread(everything), *(_spread(ratios[name]) for name in categories)])
    return markdown([f"x {against}", "all", *categories], lines)


def acceptance_table(rows: Sequence[Row], categories: Sequence[str]) -> str:
    """Markdown; a cell is "alpha / tokens a round" over all tokens of a category."""
    lines = []
    for row in rows:
        cells = [row["by_category"][name] for name in categories]
        if any(cell["acceptance_rate"] is not None for cell in cells):
            positions = " ".join(f"{share:.2f}" for share in row["acceptance_by_position"])
            lines.append([row["method"], _equal(row), positions, *map(_acceptance, cells)])
    return markdown(["alpha / tokens a round", "texts equal", "accepted at position 1, 2, ...", *categories], lines)


def caption(document: Mapping[str, Any], categories: Sequence[str]) -> str:
    """What was measured on what, in a line."""
    environment, settings = document["environment"], document["settings"]
    lengths = {row.get("draft_length", settings["draft_length"]) for row in document["results"]} - {None}
    prompts = sum(settings["prompts"][name] for name in categories)
    drawn = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}"
    return (
        f"{settings['target']}, {environment['precision']}, {environment['device_name']} "
        f"({environment['cores']} cores, load {environment['load_average']}), {drawn}, "
        f"{settings['max_new_tokens']} tokens, K = {', '.join(map(str, sorted(lengths)))}, "
        f"{prompts} prompts x {settings['repeats']}, torch {environment['torch']}, "
        f"revision {environment['revision']}, {environment['date'][:10]}"
    )


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *lines))


def row_of(rows: Sequence[Row], method: str) -> Row:
    """Raises SystemExit for a method that was not measured."""
    for row in rows:
        if row["method"] == method:
            return row
    sys.exit(f"The file has no method {method!r}: choose from {', '.join(row['method'] for row in rows)}.")


def _label(row: Row, standard: str) -> str:
    return row["method"] if row["precision"] == standard else f"{row['method']} ({row['precision']})"


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "-"
    if len(ratios) == 1:
        return f"{ratios[0]:.2f}"
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


def _acceptance(cell: Mapping[str, Any]) -> str:
    return f"{_number(cell['alpha'])} / {_number(cell['mean_acceptance_length'])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _equal(row: Row) -> str:
    return "-" if row["texts_equal"] is None else f"{row['texts_equal']:.0%}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, metavar="RESULT.json")
    parser.add_argument("--categories", metavar="A,B", help="default: all that were measured")
    parser.add_argument("--against", default="standard", metavar="METHOD", help="what counts as 1 (default: standard)")
    options = parser.parse_args(arguments)
    document = json.loads(options.file.read_text(encoding="utf-8"))
    measured = list(document["settings"]["prompts"])
    categories = options.categories.split(",") if options.categories else measured
    if unknown := [name for name in categories if name not in measured]:
        sys.exit(f"The file has no category {unknown[0]!r}: choose from {', '.join(measured)}.")
    rows = document["results"]
    print(caption(document, categories))
    print()
    print(speedup_table(rows, categories, options.against))
    print()
    print(acceptance_table(rows, categories))
    return 0


if __name__ == "__main__":
    sys.exit(main())
