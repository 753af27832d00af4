"""What a run looks like on a terminal or in a pipe.

Tokens are coloured by their fate on a terminal that has colours; everywhere else only the generated text is written,
exactly. Nothing that was written is ever taken back: text that could still be the beginning of a stop string is held
until it is known not to be. On a terminal control characters are drawn as symbols, so that a model cannot steer it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from .events import UNTOLD, Arrived, Event, Prefilled, Verified
from .metrics import Metrics

# Okabe and Ito's colour-blind-safe hues, each with a mark that is not colour.
STYLES: Mapping[str, str] = {
    "accepted": "4;38;5;36",  # underlined
    "rejected": "9;38;5;166",  # struck through
    "discarded": "2;9;38;5;245",  # faint and struck through
    "recovered": "1;38;5;172",  # bold
    "bonus": "1;4;38;5;33",  # bold and underlined
}
REFUSED = frozenset({"rejected", "discarded"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A token's text and its style, a key of STYLES or ''. Refused pieces are shown where they fell and are no part
    of the output."""

    text: str
    style: str = ""

    @property
    def kept(self) -> bool:
        return self.style not in REFUSED


def pieces_of(event: Event) -> list[Piece]:
    """What an event adds to a lane's text, refused tokens in their places. Clipped tokens are not shown."""
    if isinstance(event, Prefilled):
        return [Piece(event.token.text)]
    if isinstance(event, Arrived):
        return [Piece(event.text)]
    if not isinstance(event, Verified):
        return []
    told = [token for token in event.judged if token.fate != "clipped" and token.id != UNTOLD]
    pieces = [Piece(token.text, token.fate) for token in told]
    if event.extra is not None:
        pieces.append(Piece(event.extra.text, event.extra_kind or "" if event.judged else ""))
    return pieces


class HeldText:
    """A lane's text on its way out, less what a stop string could still cut off."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(stop)
        self._pending: list[Piece] = []
        self._released = 0

    def push(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Take new pieces; returns those that are final by now."""
        self._pending += pieces
        text = "".join(piece.text for piece in self._pending if piece.kept)
        return self._release(_final_length(text, self._stop))

    def finish(self, text: str) -> list[Piece]:
        """The rest of the output, whose whole text is `text`."""
        rest = self._release(max(0, len(text) - self._released))
        if missing := text[self._released :]:  # an incomplete character, shown at the very end
            rest.append(Piece(missing))
        self._pending.clear()
        self._released = len(text)
        return rest

    def _release(self, length: int) -> list[Piece]:
        """Take `length` characters of kept text off the pending pieces, with the refused pieces on the way."""
        released: list[Piece] = []
        while self._pending and (length > 0 or not self._pending[0].text or not self._pending[0].kept):
            piece = self._pending.pop(0)
            if piece.kept and len(piece.text) > length:
                self._pending.insert(0, Piece(piece.text[length:], piece.style))
                piece = Piece(piece.text[:length], piece.style)
            if piece.kept:
                length -= len(piece.text)
                self._released += len(piece.text)
            if piece.text:
                released.append(piece)
        return released


def _final_length(text: str, stop: Sequence[str]) -> int:
    """Length of the beginning of `text` that no stop string, found or still to come, can cut."""
    found = [at for at in (text.find(end) for end in stop) if at >= 0]
    if found:
        return min(found)
    longest = max((n for end in stop for n in range(1, len(end)) if text.endswith(end[:n])), default=0)
    return len(text) - longest


class Screen:
    """Writes pieces to a stream: in colour, or the kept text alone."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.terminal = stream.isatty()
        self.colours = has_colours(stream)

    def write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if self.colours or piece.kept:
                self.stream.write(self._drawn(piece))
        self.stream.flush()

    def _drawn(self, piece: Piece) -> str:
        text = harmless(piece.text) if self.terminal else piece.text
        if not piece.kept:
            text = text.replace("\n", "↵").replace("\t", " ")
        return f"\x1b[{STYLES[piece.style]}m{text}\x1b[0m" if self.colours and piece.style else text

    def legend(self) -> str:
        """The fates, each in its style; '' without colours."""
        if not self.colours:
            return ""
        return " ".join(self._drawn(Piece(name, name)) for name in STYLES)


def has_colours(stream: TextIO) -> bool:
    """Whether to colour: a terminal that can, and NO_COLOR (no-color.org) unset or empty."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def harmless(text: str) -> str:
    """Control characters, but for line ends and tabs, as visible symbols."""
    return "".join(_symbol(char) for char in text)


def _symbol(char: str) -> str:
    code = ord(char)
    if char in "\n\t" or (code >= 0x20 and not 0x7F <= code <= 0x9F):
        return char
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def summary(metrics: Metrics, finish_reason: str) -> str:
    """A run's numbers in one line; those of drafting only where something was drafted."""
    parts = [f"{metrics.tokens} tokens in {metrics.total_s:.2f} s"]
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} tokens/s")
    if metrics.ttft_s is not None:
        parts.append(f"first token after {1000 * metrics.ttft_s:.0f} ms")
    if metrics.drafted and metrics.acceptance_rate is not None:
        parts.append(f"{metrics.mean_acceptance_length:.2f} tokens a round in {metrics.rounds} rounds")
        parts.append(f"{100 * metrics.acceptance_rate:.0f} % of {metrics.drafted} drafted tokens accepted")
    if metrics.alpha is not None:
        parts.append(f"alpha {metrics.alpha:.2f}")
    return ", ".join([*parts, f"ended by {finish_reason}"])


class ProgressBar:
    """One line on a terminal that shows how far a long work is; nothing on a stream that is none."""

    WIDTH = 24

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = stream.isatty()
        self._length = 0

    def __call__(self, text: str, share: float) -> None:
        if not self._shown:
            return
        full = round(self.WIDTH * min(max(share, 0.0), 1.0))
        line = f"[{'#' * full}{'.' * (self.WIDTH - full)}] {100 * share:3.0f} % {harmless(text)}"
        self._stream.write("\r" + line.ljust(self._length))
        self._stream.flush()
        self._length = len(line)

    def clear(self) -> None:
        if self._shown and self._length:
            self._stream.write("\r" + " " * self._length + "\r")
            self._stream.flush()
            self._length = 0


FIGURES = (
    ("tokens/s", "tokens_per_second", ".1f"),
    ("TTFT ms", "ttft_ms", ".0f"),
    ("speedup", "speedup", ".2f"),
    ("tokens/round", "mean_acceptance_length", ".2f"),
    ("accepted", "acceptance_rate", ".0%"),
    ("alpha", "alpha", ".2f"),
)
"""What a table of measured lanes shows of any of them: title, field of a result and format."""


def cell(value: float | None, how: str) -> str:
    """A number of a table."""
    return "-" if value is None else format(value, how)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns padded to their widest cell: the first to the left, the others to the right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
