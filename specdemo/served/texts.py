"""What each token of an answer adds to its text, without a tokenizer of our own.

A chunk's text belongs to all of its tokens, and a round's fates are told token by token. vLLM's `/tokenize` tells how
the tokens of a text are written in the vocabulary, so the finished answer is sent there once. Byte-level vocabularies
write bytes as printable letters (GPT-2's scheme), SentencePiece writes spaces as U+2581 and single bytes as <0x0A>.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping, Sequence

from ..text import byte_alphabet

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE = "\u2581"


class Disagreement(Exception):
    """The ids are not those of the text."""


def token_texts(ids: Sequence[int], text: str, spellings: Mapping[int, str]) -> list[str] | None:
    """The text that each token adds, '' while a character is incomplete; together they are `text`. None where the
    spelling of a token in the middle is not known. Raises Disagreement.

    The last tokens may add nothing: what ends an answer, or was cut by a stop string, is in the ids alone.
    """
    known = list(ids)
    while known and known[-1] not in spellings:
        known.pop()
    if any(id not in spellings for id in known):
        return None
    words = [spellings[id] for id in known]
    possible = False
    for spelled in (_byte_level, _pieces):
        texts = _decoded([spelled(word) for word in words])
        for added in (texts, _without_first_space(texts)):
            if (cut := _cut(added, text)) is not None:
                return cut + [""] * (len(ids) - len(cut))
            possible = possible or text.startswith("".join(added))
    if not possible or len(known) == len(ids):
        raise Disagreement
    return None


def _byte_level(word: str) -> bytes:
    alphabet = byte_alphabet()
    return bytes(alphabet[char] for char in word) if all(char in alphabet for char in word) else word.encode()


def _pieces(word: str) -> bytes:
    match = _BYTE_TOKEN.fullmatch(word)
    return bytes.fromhex(match[1]) if match else word.replace(_SPACE, " ").encode()


def _decoded(words: Sequence[bytes]) -> list[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [decoder.decode(word) for word in words]
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts


def _without_first_space(texts: Sequence[str]) -> list[str]:
    """SentencePiece's decoder takes off the space of the first word."""
    return [texts[0].removeprefix(" "), *texts[1:]] if texts else []


def _cut(texts: Sequence[str], whole: str) -> list[str] | None:
    """The texts as far as they make up `whole`; None where they do not. What lies beyond its end is cut off."""
    found, at = [], 0
    for text in texts:
        part = text[: len(whole) - at]
        if not whole.startswith(part, at):
            return None
        found.append(part)
        at += len(part)
    return found if at == len(whole) else None
