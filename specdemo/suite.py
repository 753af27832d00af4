"""The prompts that a benchmark runs: JSON lines with an id, a category and a prompt each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import BadRequest

SUITE = Path(__file__).parent / "data" / "suite.jsonl"
LEFT_OUT = "hostile"
"""Category that shows how the page treats text, not how fast anything is: only measured when asked for."""


@dataclass(frozen=True, slots=True)
class SuitePrompt:
    id: str
    category: str
    prompt: str


def read_suite(path: Path, categories: Sequence[str] | None = None, limit: int | None = None) -> list[SuitePrompt]:
    """The prompts of a JSON lines file, at most `limit` of each category; without `categories` all but the hostile
    ones. Raises BadRequest."""
    prompts: list[SuitePrompt] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"The suite {path} cannot be read: {error}.") from None
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                record = json.loads(line)
                prompts.append(SuitePrompt(*(str(record[name]) for name in ("id", "category", "prompt"))))
            except (ValueError, KeyError, TypeError):
                raise BadRequest(
                    f"{path.name}, line {number}: a prompt is a JSON object with id, category and prompt."
                ) from None
    known = list(dict.fromkeys(prompt.category for prompt in prompts))
    if unknown := [name for name in categories or () if name not in known]:
        raise BadRequest(f"The suite has no category {unknown[0]!r}: choose from {', '.join(known)}.")
    wanted = categories or [name for name in known if name != LEFT_OUT]
    chosen = [p for name in wanted for p in [q for q in prompts if q.category == name][:limit]]
    if not chosen:
        raise BadRequest(f"The suite {path.name} has no prompts to run.")
    return chosen
