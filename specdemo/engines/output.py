"""What a lane has committed, and where it ends.

EOS, stop strings and the budget clip tokens here, before they are committed, for every engine alike. EOS stays in the
ids, as in transformers' `generate`, and out of the text. A stop string cuts the text where it begins; the ids keep the
token in which it begins and nothing after it, even when that takes back tokens of an earlier round.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..events import FinishReason
from ..text import Detokenizer, TokenText


class Output:
    """The output of one run. `budget` is the number of tokens it may have."""

    def __init__(self, text: TokenText, eos_ids: Collection[int], stop: Sequence[str], budget: int) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._detokenizer = text.detokenizer()
        self._eos_ids = frozenset(eos_ids)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, stop), default=0)
        self._budget = budget
        self._ends: list[int] = []  # length of the text after each token

    @property
    def remaining(self) -> int:
        return self._budget - len(self.ids)

    def commit(self, tokens: Sequence[int]) -> list[str]:
        """Take tokens up to the first that ends the output. Returns the text that each taken token added; what was
        not taken is clipped. The stop string's own text is in what was returned: `text` is the authority."""
        texts: list[str] = []
        for id in tokens:
            if self.finish_reason is not None:
                break
            texts.append(self._push(id))
            if id in self._eos_ids:
                texts[-1] += self._finish("eos")
            elif self._found_stop():
                self.finish_reason = "stop"
            elif self.remaining == 0:
                texts[-1] += self._finish("length")
        return texts

    def cancel(self) -> str:
        """End here, at the user's wish. Returns the text that was still held back."""
        return self._finish("cancelled") if self.finish_reason is None else ""

    def draft_texts(self, tokens: Sequence[int]) -> list[str]:
        """How tokens would read if they were next; nothing is committed."""
        detokenizer: Detokenizer = self._detokenizer.fork()
        texts = [detokenizer.push(id) for id in tokens]
        if texts:
            texts[-1] += detokenizer.flush()
        return texts

    def _push(self, id: int) -> str:
        added = "" if id in self._eos_ids else self._detokenizer.push(id)
        self.ids.append(id)
        self.text += added
        self._ends.append(len(self.text))
        return added

    def _finish(self, reason: FinishReason) -> str:
        held = self._detokenizer.flush()
        self.text += held
        self.finish_reason = "stop" if self._found_stop() else reason
        return held

    def _found_stop(self) -> bool:
        begin = self._ends[-2] if len(self._ends) > 1 else 0
        begin = max(0, begin - self._longest_stop + 1)
        found = [at for at in (self.text.find(stop, begin) for stop in self._stop) if at >= 0]
        if not found:
            return False
        cut = min(found)
        first = next((i for i, end in enumerate(self._ends) if end > cut), len(self._ends) - 1)
        del self.ids[first + 1 :], self._ends[first + 1 :]
        self.text = self.text[:cut]
        return True
