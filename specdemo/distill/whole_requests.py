"""Whole requests, composed: what people ask, where an invented question would be what a small model thinks they ask.

A small target's inventions are narrow, and a draft that learns only from their answers is at home there and nowhere
else. These requests are templates of ours filled with subjects, and for tasks on a given text also with notes, lists,
sentences with slips and pieces of code that are put together by chance, so that thousands of them differ. The answers
are the target's own in either case. Templates and words are in `data/requests.json`: `{thing}` stands for one of the
entries under "thing", which may have gaps of its own, or for what `_Gaps` makes under that name.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

KINDS = ("ask", "ask", "ask", "ask", "program", "program", "given", "given", "given", "write")
"""In turn; four in ten ask something, and so on."""


@cache
def _words() -> dict[str, list[str]]:
    words: dict[str, list[str]] = json.loads(
        (Path(__file__).parent.parent / "data" / "requests.json").read_text(encoding="utf-8")
    )
    return words


def whole_request(number: int, seed: int) -> str:
    """Request `number`: kinds in turn, the rest by chance; the same for the same arguments."""
    return _Gaps(random.Random(f"{seed}/whole/{number}"))[KINDS[number % len(KINDS)]]


class _Gaps(dict[str, str]):
    """What stands in for the name of a gap: something new each time, but for names whose meaning must stay."""

    def __init__(self, chance: random.Random) -> None:
        days = chance.sample(_words()["day"], 3)
        super().__init__(x=chance.choice(_words()["name"]), where=chance.choice(_words()["place"]), when=days[0])
        self._chance = chance
        self._days = sorted(days)

    def __missing__(self, name: str) -> str:
        chance, words = self._chance, _words()
        if name in words:
            return chance.choice(words[name]).format_map(self)
        match name:
            case "digit":
                return str(chance.randrange(2, 9))
            case "teen":
                return str(chance.randrange(10, 50))
            case "hundreds":
                return str(chance.randrange(2, 90) * 100)
            case "year":
                return str(chance.randrange(1790, 1990))
            case "paragraph":
                facts = chance.sample(words["fact"], chance.randrange(2, 5))
                return " ".join(["The {place} in {town} was built in {year}.", *facts]).format_map(self)
            case "note":
                hours = ", ".join(f"from {self._morning()} to {self._evening()} on {day}s" for day in self._days)
                return f"The {self['where']} is open {hours}. It is closed in {self['month']}."
            case "bullets":
                mark = chance.choice(("- ", "* ", ""))
                return "\n".join(mark + item for item in chance.sample(words["object"], chance.randrange(3, 8)))
            case "sections":
                return "\n\n".join(f"{title}\n{self['sentence']}" for title in chance.sample(words["heading"], 3))
            case "slips":
                return _with_slips(" ".join(chance.sample(words["sentence"], chance.randrange(1, 4))), chance)
        raise KeyError(name)

    def _morning(self) -> str:
        return f"{self._chance.randrange(6, 11)}:{self._chance.choice(('00', '30'))}"

    def _evening(self) -> str:
        return f"{self._chance.randrange(15, 22)}:00"


def _with_slips(text: str, chance: random.Random) -> str:
    """`text` with some letters lost, doubled or swapped."""
    letters = list(text)
    for _ in range(max(2, len(text) // 25)):
        at = chance.randrange(1, len(letters) - 1)
        if not (letters[at].isalpha() and letters[at + 1].isalpha()):
            continue
        letters[at : at + 2] = chance.choice(
            (letters[at + 1 : at + 2], [letters[at], letters[at], letters[at + 1]], letters[at : at + 2][::-1])
        )
    return "".join(letters)
