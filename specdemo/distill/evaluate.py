"""What a draft is worth: acceptance as speculative decoding would see it, from one pass over known greedy texts.

At temperature 0 a draft is accepted up to its first token that is not the target's. Until then the draft has seen the
target's own text, so its choices are those it makes over the known text, all positions at once: rounds can be counted
without decoding. `bench` measures the same on the engines; this is for the many checks during training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .data import ANSWER, Corpus, collate
from .student import Student


@dataclass(frozen=True, slots=True)
class Acceptance:
    """At one draft_length, over whole answers. See design vocabulary: alpha = accepted / judged;
    mean_acceptance_length = tokens per target forward, the extra token included, the prefill's first token not."""

    alpha: float
    mean_acceptance_length: float
    accepted: int
    judged: int
    rounds: int


def agreements(student: Student, corpus: Corpus, conversations: Sequence[int]) -> list[NDArray[np.bool_]]:
    """For each conversation, answer position by position: is the draft's argmax the token that stands there?"""
    device = student.norm.device
    result: list[NDArray[np.bool_]] = []
    for start in range(0, len(conversations), 8):
        some = conversations[start : start + 8]
        batch = collate(corpus, some).to(device)
        with torch.no_grad():
            guesses = student.vocab_ids[student(batch).argmax(dim=-1)].cpu().numpy()
        at = 0
        for i in some:
            begin, end = int(corpus.offsets[i]), int(corpus.offsets[i + 1])
            answer = begin + 1 + np.flatnonzero(corpus.role[begin + 1 : end] == ANSWER)
            result.append(guesses[at : at + len(answer)] == corpus.tokens[answer])
            at += len(answer)
    return result


def acceptance(agreed: Sequence[NDArray[np.bool_]], draft_length: int) -> Acceptance:
    """Count rounds over answers; the first token of each is the prefill's."""
    accepted = judged = rounds = emitted = 0
    for text in agreed:
        position = 1
        while position < len(text):
            room = min(draft_length, len(text) - position - 1)
            drafted = text[position : position + room]
            kept = room if bool(drafted.all()) else int(np.argmin(drafted))
            accepted, judged = accepted + kept, judged + kept + (kept < room)
            rounds, emitted = rounds + 1, emitted + kept + 1
            position += kept + 1
    return Acceptance(accepted / max(judged, 1), emitted / max(rounds, 1), accepted, judged, rounds)


def greedy_answers(corpus: Corpus, conversations: Sequence[int]) -> list[int]:
    """The conversations whose answer is the target's argmax throughout."""
    chosen = []
    for i in conversations:
        span = slice(int(corpus.offsets[i]), int(corpus.offsets[i + 1]))
        answer = corpus.role[span] == ANSWER
        if answer.any() and np.array_equal(corpus.tokens[span][answer], corpus.top_ids[span, 0][answer]):
            chosen.append(i)
    return chosen
