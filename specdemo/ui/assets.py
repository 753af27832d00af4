"""What the page is made of besides Gradio: its text in every language, its style, its scripts.

The page puts them into the document's head; an exported run carries them in its own file.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

LANGUAGES = ("en", "zh")
"""Each has a file text.LANGUAGE.json, all with the same keys. The first is the one that the server speaks."""

LIVE_SCRIPTS = ("parts.js", "models.js", "guide.js", "compare.js", "share.js")
"""Modules that only make sense with a server behind them; an exported run leaves them out."""

SCRIPTS = (
    "core.js",
    "story.js",
    "lane.js",
    "score.js",
    "same.js",
    "why.js",
    "player.js",
    "round.js",
    "ssd.js",
    "timeline.js",
    "charts.js",
    "ssd_lessons.js",
    "lessons.js",
    "presenter.js",
    "stage.js",
    *LIVE_SCRIPTS,
    "language.js",  # last: it takes hold of all the others
)
"""The page's modules in the order in which they run."""

KEPT_SCRIPTS = (*(name for name in SCRIPTS[:-1] if name not in LIVE_SCRIPTS), "keep.js", SCRIPTS[-1])
"""Those of an exported run."""

STYLES = ("page.css", "why.css", "after.css", "ssd.css", "tools.css", "models.css")


def static(name: str) -> str:
    """A file of ui/static as text."""
    return (files("specdemo") / "ui" / "static" / name).read_text(encoding="utf-8")


@cache
def _texts(language: str) -> dict[str, str]:
    texts: dict[str, str] = json.loads(static(f"text.{language}.json"))
    return texts


def strings(language: str = LANGUAGES[0]) -> dict[str, str]:
    """The page's text in a language, by key."""
    return dict(_texts(language))


def escaped(value: Any) -> str:
    """JSON that is safe inside a script element."""
    return json.dumps(value).replace("<", "\\u003c")


def style() -> str:
    """The page's look."""
    return "\n".join(map(static, STYLES))


def script(names: tuple[str, ...] = SCRIPTS) -> str:
    """The modules as one program, the text between the first and the rest."""
    texts = {language: strings(language) for language in LANGUAGES}
    parts = [static(names[0]), f"specdemo.texts = {escaped(texts)};", "specdemo.strings = specdemo.texts.en;"]
    return "\n".join([*parts, *map(static, names[1:])])
