"""The text that a draft learns from: conversations of the target with itself, and what the target thought of them.

On disk a shard is an npz file with the arrays `tokens` uint16 or int32 [N] (all conversations, one after the other),
`offsets` int64 [C + 1], `role` uint8 [N] (0 template or seed words, 1 invented user turn, 2 answer), `top_ids` and
`top_logprobs` [N, 4]: the target's likeliest ids and log-probabilities for the token AT that index, given all before.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

QUESTION, ANSWER = 1, 2
HELD_OUT_PERCENT = 3


@dataclass(frozen=True, slots=True)
class Corpus:
    """Conversations as flat arrays; conversation i is [offsets[i], offsets[i + 1])."""

    tokens: NDArray[np.int32]  # [N]
    offsets: NDArray[np.int64]  # [C + 1]
    role: NDArray[np.uint8]  # [N]
    top_ids: NDArray[np.int32]  # [N, 4]
    top_logprobs: NDArray[np.float16]  # [N, 4]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def text(self, conversation: int) -> list[int]:
        """A conversation's token ids."""
        return [int(token) for token in self.tokens[self.offsets[conversation] : self.offsets[conversation + 1]]]

    def answer_tokens(self) -> int:
        return int((self.role == ANSWER).sum())

    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


@dataclass(frozen=True, slots=True)
class Batch:
    """B conversations padded to T tokens, and the S positions whose next token is learned."""

    ids: Tensor  # int64 [B, T]
    rows: Tensor  # int64 [S], flat index b * T + t of the position that predicts
    top_ids: Tensor  # int64 [S, 4], the target's for the token after it
    top_probs: Tensor  # float32 [S, 4]
    tokens: int  # real ones, without padding

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        if device.type == "cpu":
            return self
        moved = (tensor.to(device) for tensor in (self.ids, self.rows, self.top_ids, self.top_probs))
        return Batch(next(moved), next(moved), next(moved), next(moved), self.tokens)


def load(paths: Sequence[Path]) -> Corpus:
    """Read shards."""
    parts = [np.load(path) for path in paths]
    tokens = np.concatenate([part["tokens"].astype(np.int32) for part in parts])
    lengths = np.concatenate([np.diff(part["offsets"]) for part in parts])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return Corpus(
        tokens,
        offsets,
        np.concatenate([part["role"] for part in parts]),
        np.concatenate([part["top_ids"].astype(np.int32) for part in parts]),
        np.concatenate([part["top_logprobs"] for part in parts]),
    )


def save_shard(
    path: Path,
    tokens: Sequence[Sequence[int]],
    roles: Sequence[Sequence[int]],
    top_ids: Sequence[Sequence[Sequence[int]]],
    top_logprobs: Sequence[Sequence[Sequence[float]]],
    begun: int,
) -> None:
    """Write conversations as one shard, whole or not at all. begun: conversations begun so far, for resuming."""
    flat = [token for text in tokens for token in text]
    kind = (
        np.uint16 if max(flat) < 2**16 and max(i for text in top_ids for row in text for i in row) < 2**16 else np.int32
    )
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.array(flat, kind),
            offsets=np.cumsum([0, *(len(text) for text in tokens)]).astype(np.int64),
            role=np.array([role for text in roles for role in text], np.uint8),
            top_ids=np.array([row for text in top_ids for row in text], kind),
            top_logprobs=np.array([row for text in top_logprobs for row in text], np.float16),
            begun=np.int64(begun),
        )
    partial.replace(path)


def split(corpus: Corpus) -> tuple[list[int], list[int]]:
    """(training, held-out) conversations. By a hash of the tokens, so that data added later moves nothing across
    and the two halves share no identical conversation."""
    train: list[int] = []
    held_out: list[int] = []
    for i in range(len(corpus)):
        text = corpus.tokens[corpus.offsets[i] : corpus.offsets[i + 1]]
        (held_out if zlib.crc32(text.tobytes()) % 100 < HELD_OUT_PERCENT else train).append(i)
    return train, held_out


def without_loops(corpus: Corpus, conversations: Sequence[int], longest: int = 12) -> Corpus:
    """The corpus with the answers of `conversations` cut where they have repeated `longest` tokens of what stands
    before, word for word.

    Small models end in loops. What a loop teaches is to copy, and a dozen tokens teach it as well as a hundred; a third
    of the tokens of greedy answers goes, and with it a third of the time.
    """
    kept: list[NDArray[np.int64]] = []
    some = set(conversations)
    for i in range(len(corpus)):
        begin, end = int(corpus.offsets[i]), int(corpus.offsets[i + 1])
        answers = np.flatnonzero(corpus.role[begin:end] == ANSWER)
        first = int(answers[0]) if len(answers) else end - begin
        length = _until_loop(corpus.text(i), first, longest) if i in some else end - begin
        kept.append(np.arange(begin, begin + length))
    chosen = np.concatenate(kept)
    return Corpus(
        corpus.tokens[chosen],
        np.cumsum([0, *(len(part) for part in kept)]).astype(np.int64),
        corpus.role[chosen],
        corpus.top_ids[chosen],
        corpus.top_logprobs[chosen],
    )


def _until_loop(text: Sequence[int], first: int, longest: int) -> int:
    """Tokens of `text` up to where, from position `first` on, `longest` in a row repeat earlier ones in order."""
    latest: dict[tuple[int, ...], int] = {}  # three tokens -> where they last ended
    source, run = -1, 0  # the token at `source` was repeated last, and `run` tokens up to it
    for position in range(2, len(text)):
        gram = tuple(text[position - 2 : position + 1])
        if run and text[source + 1] == text[position]:
            source, run = source + 1, run + 1
        else:
            source = latest.get(gram, -1)
            run = 3 if source >= 0 else 0
        latest[gram] = position
        if run >= longest and position >= first:
            return position + 1
    return len(text)


def with_questions(corpus: Corpus, conversations: Sequence[int]) -> Corpus:
    """The corpus with the invented questions of `conversations` to be learned as well as their answers.

    The target's opinion on each token of its questions is known as that on its answers: a quarter more to learn from,
    where text is what a draft is short of. Rows that hold no opinion (all zero) stay out.
    """
    learned = np.zeros(len(corpus.tokens), bool)
    for i in conversations:
        learned[corpus.offsets[i] : corpus.offsets[i + 1]] = True
    learned &= (corpus.role == QUESTION) & (corpus.top_logprobs[:, 0] != 0)
    return replace(corpus, role=np.where(learned, np.uint8(ANSWER), corpus.role))


def occurrences(corpus: Corpus, ids: Sequence[int]) -> int:
    """How often `ids` stand in the corpus, one after the other."""
    if not ids:
        return 0
    places = np.flatnonzero(corpus.tokens[: len(corpus.tokens) - len(ids) + 1] == ids[0])
    for ahead, token in enumerate(ids[1:], start=1):
        places = places[corpus.tokens[places + ahead] == token]
    return len(places)


def frequent_ids(corpus: Corpus, conversations: Sequence[int], size: int, always: Sequence[int] = ()) -> list[int]:
    """The `size` ids that the target likes best in the answers, ascending; `always` are among them."""
    mask = np.zeros(len(corpus.tokens), bool)
    for i in conversations:
        mask[corpus.offsets[i] : corpus.offsets[i + 1]] = True
    mask &= corpus.role == ANSWER
    ids = corpus.top_ids[mask]
    counts = np.bincount(ids.ravel(), weights=np.exp(corpus.top_logprobs[mask].astype(np.float32)).ravel())
    counts[list(always)] = np.inf
    return sorted(np.argsort(-counts, kind="stable")[:size].tolist())


def grouped(corpus: Corpus, conversations: Sequence[int], tokens_per_group: int, seed: int) -> list[list[int]]:
    """One pass over the conversations in an order given by `seed`, in groups of about equal size with padding, each of
    neighbours in length."""
    rng = np.random.default_rng(seed)
    lengths = corpus.lengths()
    order = rng.permutation(np.asarray(conversations))
    groups: list[list[int]] = []
    pool = 16 * max(1, tokens_per_group // int(lengths[order].mean()))
    for start in range(0, len(order), pool):
        group: list[int] = []
        for i in sorted(order[start : start + pool].tolist(), key=lambda i: int(lengths[i])):
            if group and (len(group) + 1) * int(lengths[i]) > tokens_per_group:
                groups.append(group)
                group = []
            group.append(i)
        groups.append(group)
    return [groups[g] for g in rng.permutation(len(groups))]


def collate(corpus: Corpus, conversations: Sequence[int]) -> Batch:
    """Pad some conversations on the right. The last token of each predicts nothing and is left out."""
    length = max(int(corpus.offsets[i + 1] - corpus.offsets[i]) for i in conversations) - 1
    ids = np.zeros((len(conversations), length), np.int64)
    rows, tops, logprobs = [], [], []
    total = 0
    for b, i in enumerate(conversations):
        begin, end = int(corpus.offsets[i]), int(corpus.offsets[i + 1])
        n = end - begin - 1
        total += n
        ids[b, :n] = corpus.tokens[begin : end - 1]
        learned = np.flatnonzero(corpus.role[begin + 1 : end] == ANSWER)
        rows.append(b * length + learned)
        tops.append(corpus.top_ids[begin + 1 + learned])
        logprobs.append(corpus.top_logprobs[begin + 1 + learned])
    return Batch(
        torch.from_numpy(ids),
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate(tops).astype(np.int64)),
        torch.from_numpy(np.exp(np.concatenate(logprobs).astype(np.float32))),
        total,
    )
