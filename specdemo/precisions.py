"""What each precision of the target costs and gives: memory, speed, and the price of verifying, with the same prompts.

Each is loaded alone and released before the next, so a card needs room for one. Memory is what the weights of both
models really take, counted, beside what the plan had said.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .benchmark import STANDARD
from .benchmark import tables as lane_tables
from .errors import BadRequest, SpecdemoError
from .models.held import weights_held
from .models.loading import Pair
from .models.memory import free_memory
from .plan.choose import PRECISIONS
from .plan.sizes import GIB
from .terminal import cell, table

Load = Callable[[str, str], Pair]


def measure(names: Sequence[str], load: Load, bench: Callable[[Pair], dict[str, Any]]) -> dict[str, Any]:
    """One document over all precisions. `load` takes `--dtype` and `--quantize`, `bench` gives a pair's document. A
    precision that cannot be had is a row with its reason. Raises BadRequest for a name that is none of PRECISIONS, and
    whatever every precision failed with."""
    for name in names:
        if name not in PRECISIONS:
            raise BadRequest(f"There is no precision {name!r}: choose from {', '.join(PRECISIONS)}.")
    rows: list[dict[str, Any]] = []
    documents: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        try:
            pair = load(*PRECISIONS[name])
            documents[name] = bench(pair)
        except SpecdemoError as error:
            failure = error
            rows.append({"kept": name, "reason": str(error)})
            continue
        rows.append(_row(name, pair, documents[name]))
        del pair
        free_memory()
    if not documents:
        raise failure
    first = next(iter(documents.values()))
    results = [{"kept": name, **row} for name, document in documents.items() for row in document["results"]]
    settings = {**first["settings"], "precisions": list(dict.fromkeys(names))}
    return {"environment": first["environment"], "settings": settings, "precisions": rows, "results": results}


def _row(name: str, pair: Pair, document: Mapping[str, Any]) -> dict[str, Any]:
    standard = next(row for row in document["results"] if row["method"] == STANDARD)
    drafting = [row for row in document["results"] if row["verify_cost"] is not None]
    fastest = max((row for row in drafting if row["speedup"] is not None), key=lambda row: row["speedup"], default=None)
    planned = pair.plan.bytes if pair.plan else None
    return {
        "kept": name,
        "precision": pair.target.precision,
        "path": pair.target.forward_path,
        "memory": weights_held(*(model for model in (pair.target, pair.draft) if model)),
        "planned": planned.target_weights + planned.draft_weights if planned else None,
        "tokens_per_second": standard["tokens_per_second"],
        "forward_ms": standard["forward_ms_by_width"].get("1"),
        "verify_cost": fastest["verify_cost"] if fastest else None,
        "fastest": fastest["method"] if fastest else None,
        "speedup": fastest["speedup"] if fastest else None,
        "acceptance_rate": fastest["acceptance_rate"] if fastest else None,
    }


def tables(document: Mapping[str, Any]) -> str:
    """The document for people: precisions side by side, then the lanes of each."""
    columns = [
        "target",
        "precision",
        "memory GiB",
        "planned",
        "tokens/s",
        "verify cost",
        "fastest",
        "speedup",
        "accepted",
    ]
    measured = [row for row in document["precisions"] if "reason" not in row]
    cells = [
        [
            row["kept"],
            row["precision"],
            cell(row["memory"] / GIB, ".2f"),
            cell(row["planned"] / GIB if row["planned"] is not None else None, ".2f"),
            cell(row["tokens_per_second"], ".1f"),
            cell(row["verify_cost"], ".2f"),
            row["fastest"] or "-",
            cell(row["speedup"], ".2f"),
            cell(row["acceptance_rate"], ".0%"),
        ]
        for row in measured
    ]
    parts = [table(columns, cells)]
    parts += [f"{row['kept']}: {row['reason']}" for row in document["precisions"] if "reason" in row]
    for row in measured:
        own = [result for result in document["results"] if result["kept"] == row["kept"]]
        parts.append(f"{row['kept']}\n{lane_tables({**document, 'results': own})}")
    return "\n\n".join(parts)
