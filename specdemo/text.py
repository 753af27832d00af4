"""Token ids to text and back.

Output text is made one token at a time and never shows half a character: what a token adds is known when its last
byte is. Only an incomplete suffix is held back, so a genuine U+FFFD passes at once, and whatever is still held is
flushed at the end. Byte-level vocabularies (GPT-2's scheme: most current models) are decoded by their bytes, exactly;
others through the tokenizer's own decoder, by what a longer decode adds to a shorter one.
"""

from __future__ import annotations

import codecs
import json
from functools import lru_cache
from typing import Any

from .errors import BadRequest

HELD_TOKENS = 3  # a character has at most four bytes, so an incomplete one at most three tokens


class TokenText:
    """The text of a tokenizer's ids. `tokenizer` is a transformers fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        self._added = {id: token.content for id, token in added.items()}
        self._byte_level = _decoder_type(tokenizer) == "ByteLevel"
        self._cached_piece = lru_cache(maxsize=65536)(self._piece)

    def piece(self, id: int) -> str:
        """How a token reads alone: special tokens by name, incomplete characters as U+FFFD."""
        return self._cached_piece(id)

    def _piece(self, id: int) -> str:
        if id in self._added:
            return self._added[id]
        if self._byte_level:
            return self.bytes_of(id).decode("utf-8", errors="replace")
        # two copies, since a decoder may strip the space before the first word
        once, twice = self.tokenizer.decode([id]), self.tokenizer.decode([id, id])
        return str(twice[len(once) :])

    def bytes_of(self, id: int) -> bytes:
        """The bytes of an ordinary token of a byte-level vocabulary; b'' for an id without a token."""
        if id in self._added:
            return self._added[id].encode()
        token = self.tokenizer.convert_ids_to_tokens(id)
        if token is None:
            return b""
        alphabet = _byte_alphabet()
        if any(char not in alphabet for char in token):
            return str(token).encode()
        return bytes(alphabet[char] for char in token)

    def detokenizer(self) -> Detokenizer:
        return _ByteDetokenizer(self) if self._byte_level else _DiffDetokenizer(self)


class Detokenizer:
    """One output's text, token by token. Special tokens add nothing."""

    def push(self, id: int) -> str:
        """What the token adds to the text, completed characters only."""
        raise NotImplementedError

    def flush(self) -> str:
        """What is still held back, incomplete characters as U+FFFD."""
        raise NotImplementedError

    def fork(self) -> Detokenizer:
        """An independent copy: how a refused draft would have read from here."""
        raise NotImplementedError


class _ByteDetokenizer(Detokenizer):
    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, id: int) -> str:
        return "" if id in self._text.special_ids else self._decoder.decode(self._text.bytes_of(id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> Detokenizer:
        copy = _ByteDetokenizer(self._text)
        copy._decoder.setstate(self._decoder.getstate())
        return copy


class _DiffDetokenizer(Detokenizer):
    def __init__(self, text: TokenText) -> None:
        self._text = text
        self._ids: list[int] = []  # the last shown tokens, as context, and those held back
        self._shown = 0

    def push(self, id: int) -> str:
        if id in self._text.special_ids:
            return ""
        self._ids.append(id)
        added = self._added()
        if added.endswith("\ufffd") and len(self._ids) - self._shown <= HELD_TOKENS:
            return ""
        self._advance()
        return added

    def flush(self) -> str:
        added = self._added()
        self._advance()
        return added

    def fork(self) -> Detokenizer:
        copy = _DiffDetokenizer(self._text)
        copy._ids, copy._shown = list(self._ids), self._shown
        return copy

    def _added(self) -> str:
        before, after = (self._text.tokenizer.decode(ids) for ids in (self._ids[: self._shown], self._ids))
        return str(after[len(before) :])

    def _advance(self) -> None:
        self._ids = self._ids[-8:]
        self._shown = len(self._ids)


def encode_prompt(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """The ids that a prompt becomes: one user turn in the model's chat template, tokenized once so that special
    tokens are not added twice; as plain text when `raw` or when the model has no template. Raises BadRequest."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise BadRequest("The prompt is empty: type a question or a text to continue.")
    if "\x00" in prompt:
        raise BadRequest("The prompt contains a NUL character: remove it and try again.")
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"The prompt contains half a character (a lone surrogate) at position {error.start + 1}: "
            "remove it and try again."
        ) from None
    if raw or not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    turn = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False))


def _decoder_type(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    return str(decoder.get("type"))


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 characters stand for themselves, the other
    bytes, in order, for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
