"""Token ids to text and back.

Output text is made one token at a time and never shows half a character: what a token adds is known when its last
byte is. Only an incomplete suffix is held back, so a genuine U+FFFD passes at once, and whatever is still held is
flushed at the end. Byte-level vocabularies (GPT-2's scheme: most current models) and SentencePiece's byte tokens are
decoded by their bytes, exactly; other tokens through the tokenizer's own decoder, by what they add behind another.
"""

from __future__ import annotations

import codecs
import json
import re
from functools import lru_cache
from typing import Any

from .errors import BadRequest

_utf8 = codecs.getincrementaldecoder("utf-8")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The text of a tokenizer's ids. `tokenizer` is a transformers fast tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {id for id, token in added.items() if token.special}
        self._added: dict[int, str] = {id: token.content for id, token in added.items()}
        decoder_types = _decoder_types(tokenizer)
        self._byte_level = "ByteLevel" in decoder_types and decoder_types <= {"ByteLevel", "Fuse"}
        self._byte_fallback = not decoder_types or "ByteFallback" in decoder_types
        self._cached_piece = lru_cache(maxsize=65536)(self._piece)

    def piece(self, id: int) -> str:
        """How a token reads alone: special tokens by name, incomplete characters as U+FFFD."""
        return self._cached_piece(id)

    def _piece(self, id: int) -> str:
        if id in self._added:
            return self._added[id]
        if self._byte_level:
            return self.bytes_of(id).decode("utf-8", errors="replace")
        return self.added_by(id, behind=[id])  # alone, it might be stripped of its space

    def added_by(self, id: int, behind: list[int]) -> str:
        """What a token adds to the decoder's text behind other tokens. Decoders may strip the first word's space."""
        before, after = (
            self.tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in (behind, [*behind, id])
        )
        return str(after[len(before) :])

    def byte_of(self, id: int) -> bytes | None:
        """The byte of a byte-fallback token such as <0x0A>, else None."""
        token = self.tokenizer.convert_ids_to_tokens(id) if self._byte_fallback else None
        match = _BYTE_TOKEN.fullmatch(token) if token else None
        return bytes.fromhex(match[1]) if match else None

    def bytes_of(self, id: int) -> bytes:
        """The bytes of an ordinary token of a byte-level vocabulary; b'' for an id without a token."""
        if id in self._added:
            return self._added[id].encode()
        token = self.tokenizer.convert_ids_to_tokens(id)
        if token is None:
            return b""
        alphabet = byte_alphabet()
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
        self._decoder = _utf8(errors="replace")

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
        self._last: list[int] = []  # the last token with a text, as context of the next
        self._decoder = _utf8(errors="replace")

    def push(self, id: int) -> str:
        if id in self._text.special_ids or self._text.tokenizer.convert_ids_to_tokens(id) is None:
            return ""
        byte = self._text.byte_of(id)
        if byte is not None:
            added = self._decoder.decode(byte)
        else:
            added = self.flush() + self._text.added_by(id, behind=self._last)
        self._last = [id]
        return added

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def fork(self) -> Detokenizer:
        copy = _DiffDetokenizer(self._text)
        copy._last = self._last
        copy._decoder.setstate(self._decoder.getstate())
        return copy


def check_prompt(prompt: str) -> None:
    """What can be said of a prompt before there is a tokenizer. Raises BadRequest."""
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


def encode_prompt(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """The ids that a prompt becomes: one user turn in the model's chat template, tokenized once so that special
    tokens are not added twice; as plain text when `raw` or when the model has no template. Raises BadRequest."""
    check_prompt(prompt)
    if raw or not tokenizer.chat_template:
        return list(tokenizer.encode(prompt))
    turn = [{"role": "user", "content": prompt}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False))


def _decoder_types(tokenizer: Any) -> frozenset[str]:
    """The types of the tokenizer's decoder or of the steps of its sequence; empty where it has none of its own."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    own = getattr(backend, "decoder", None)
    decoder = json.loads(own.__getstate__()) if own is not None else None  # the whole tokenizer's would be megabytes
    return frozenset(step["type"] for step in decoder.get("decoders", [decoder])) if decoder else frozenset()


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 characters stand for themselves, the other
    bytes, in order, for the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet
