"""The target writes the text that its draft learns from: answers, and many of the questions too.

After the chat template's opening comes a whole request of ours (`whole_requests`), or a few seed words (`requests`)
from which the target goes on until it ends the user's turn; then it answers. Its questions are sampled; most answers
are greedy, as most use is, the others sampled at several temperatures. Every token of the target's is stored with its
likeliest four, so training never runs the target.

Shards are written whole or not at all; a run that was killed goes on after its last shard.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .data import ANSWER, QUESTION, save_shard
from .requests import seed_words
from .slots import SlotDecoder
from .whole_requests import whole_request

TOP = 4  # kept of the target's distribution
CANDIDATES, TOP_P = 32, 0.95
WHOLE_SHARE = 0.5  # of the conversations that begin with a whole request
GREEDY_SHARE = 0.75
TEMPERATURES = (0.6, 0.8, 1.0)
ANSWER_LIMITS = (96, 160, 220)
QUESTION_LIMIT = 64
REQUEST_LIMIT = 120  # tokens of a whole request
SEED = 0


@dataclass(frozen=True, slots=True)
class Frame:
    """The fixed tokens around a question and its answer, from the chat template; both empty but for a first token
    where there is none, and then the text after the seed words is one free answer."""

    opening: list[int]
    between: list[int]
    eos_ids: frozenset[int]

    @classmethod
    def of(cls, tokenizer: Any, eos_ids: Collection[int]) -> Frame:
        if not tokenizer.chat_template:
            first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            return cls([first], [], frozenset(eos_ids))
        mark = "\u2402mark\u2403"
        turn = [{"role": "user", "content": mark}]
        text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
        before, _, after = str(text).partition(mark)
        opening, between = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
        return cls(opening, between, frozenset(eos_ids))


@dataclass(slots=True)
class Conversation:
    """One text on its way. `forced`: (token, role) to come before the target may choose again."""

    forced: list[tuple[int, int]]
    temperature: float
    limit: int
    tokens: list[int] = field(default_factory=list)
    roles: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    answering: bool = False
    length: int = 0  # of the current turn, forced tokens not counted

    def append(self, token: int, role: int, ids: list[int], logprobs: list[float]) -> None:
        self.tokens.append(token)
        self.roles.append(role)
        self.top_ids.append(ids)
        self.top_logprobs.append(logprobs)


class Writer:
    """Conversations on all slots of a decoder. `encode`: text -> ids. `exclude`: questions (ids) never to be kept."""

    def __init__(
        self,
        decoder: SlotDecoder,
        frame: Frame,
        encode: Callable[[str], list[int]],
        slots: int,
        seed: int,
        begun: int = 0,
        known: Collection[tuple[int, ...]] = (),
    ) -> None:
        self.begun = begun  # number of the next conversation
        self.known = set(known)  # questions that were asked, and those never to be kept
        self.finished: list[Conversation] = []
        self.dropped = 0
        self._decoder, self._frame, self._encode = decoder, frame, encode
        self._seed = seed
        self._generator = torch.Generator(decoder.positions.device).manual_seed(seed * 1_000_003 + begun)
        read = decoder.begin_with(frame.opening[:-1])  # its last token is the first one that a slot is fed
        ids, logprobs = likeliest(read, TOP)
        self._opinions = [([0] * TOP, [0.0] * TOP), *zip(ids.tolist(), logprobs.tolist(), strict=True)]
        self._texts = [self._begin(slot) for slot in range(slots)]

    def _begin(self, slot: int) -> Conversation:
        number, self.begun = self.begun, self.begun + 1
        chance = random.Random(f"{self._seed}/{number}")
        temperature = 0.0 if chance.random() < GREEDY_SHARE else chance.choice(TEMPERATURES)
        limit = chance.choice(ANSWER_LIMITS)
        frame = self._frame
        begin = self._encode(seed_words(number, self._seed))
        if frame.between and chance.random() < WHOLE_SHARE:
            request = self._encode(whole_request(number, self._seed))
            if len(request) <= REQUEST_LIMIT and tuple(request) not in self.known:
                self.known.add(tuple(request))
                begin = request + frame.between
        text = Conversation([(token, SEED) for token in begin], temperature, limit, answering=not frame.between)
        for token, (ids, logprobs) in zip(frame.opening, self._opinions, strict=True):
            text.append(token, SEED, ids, logprobs)
        self._decoder.reset(slot)
        return text

    def step(self) -> None:
        """One token for every slot."""
        device = self._decoder.positions.device
        logits = self._decoder.step(torch.tensor([text.tokens[-1] for text in self._texts], device=device))
        temperatures = [text.temperature if text.answering else 1.0 for text in self._texts]
        ids, logprobs, drawn = choose(logits, torch.tensor(temperatures, device=device), self._generator)
        top_ids, top_logprobs, chosen = ids.tolist(), logprobs.tolist(), drawn.tolist()
        for slot, text in enumerate(self._texts):
            if text.forced:
                token, role = text.forced.pop(0)
            else:
                token, role = chosen[slot], ANSWER if text.answering else QUESTION
                text.length += 1
            text.append(token, role, top_ids[slot], top_logprobs[slot])
            if not text.forced and not self._go_on(text):
                self._texts[slot] = self._begin(slot)

    def _go_on(self, text: Conversation) -> bool:
        """Whether the text goes on after its last token; a question that ends turns into its answer."""
        frame, token = self._frame, text.tokens[-1]
        if text.roles[-1] == SEED:
            text.answering = text.answering or text.tokens[-len(frame.between) :] == frame.between
            return True
        if text.answering:
            if token in frame.eos_ids or text.length >= text.limit or len(text.tokens) >= self._decoder.capacity:
                self.finished.append(text)
                return False
            return True
        ended = token == frame.between[0]
        if not ended and token in frame.eos_ids:
            self.dropped += 1
            return False
        if not ended and text.length < QUESTION_LIMIT:
            return True
        question = tuple(text.tokens[len(frame.opening) : len(text.tokens) - ended])
        if question in self.known:
            self.dropped += 1
            return False
        self.known.add(question)
        if ended:
            text.roles[-1] = SEED
        text.forced = [(token, SEED) for token in frame.between[ended:]]
        text.length = 0
        text.answering = not text.forced
        return True


def choose(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """(top ids [S, 4], their log-probabilities, one id per row) for logits [S, V]; temperature 0 is greedy.

    Sampling: the likeliest 32, then temperature, then top-p 0.95.
    """
    ids, logprobs = likeliest(logits, CANDIDATES)
    probs = (logprobs / temperatures.clamp(min=1e-3)[:, None]).softmax(dim=-1)
    probs = probs * (probs.cumsum(dim=-1) - probs < TOP_P)
    drawn = torch.multinomial(probs, 1, generator=generator)
    drawn = torch.where(temperatures[:, None] == 0, torch.zeros_like(drawn), drawn)
    return ids[:, :TOP], logprobs[:, :TOP], ids.gather(1, drawn).squeeze(1)


def likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(top ids [S, count], their log-probabilities) for logits [S, V]."""
    best, ids = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return ids, best - logits.logsumexp(dim=-1, keepdim=True)


def generate(
    folder: Path,
    target: Path,
    tokenizer: Any,
    eos_ids: Collection[int],
    answer_tokens: int,
    device: torch.device,
    slots: int,
    seed: int = 0,
    exclude: Sequence[str] = (),
    shard_tokens: int = 50_000,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:
    """Write shards to `folder` until they hold `answer_tokens` tokens of answers; returns all of them.

    exclude: questions never to be kept (an evaluation's prompts). report: called with answer tokens done and wanted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    frame = Frame.of(tokenizer, eos_ids)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    shards = sorted(folder.glob("selfgen-*.npz"))
    done, begun, known = 0, 0, {tuple(encode(question)) for question in exclude}
    for shard in shards:
        with np.load(shard) as arrays:
            done += int((arrays["role"] == ANSWER).sum())
            begun = max(begun, int(arrays["begun"]))
            known |= set(_questions(arrays, frame))
    if done >= answer_tokens:
        return shards
    longest = len(frame.opening) + len(frame.between) + max(32 + QUESTION_LIMIT, REQUEST_LIMIT) + max(ANSWER_LIMITS)
    decoder = SlotDecoder.from_folder(target, slots, longest, device)
    writer = Writer(decoder, frame, encode, slots, seed, begun, known)
    pending = 0
    while done + pending < answer_tokens:
        before = len(writer.finished)
        writer.step()
        pending += sum(text.roles.count(ANSWER) for text in writer.finished[before:])
        if len(writer.finished) > before:
            report(done + pending, answer_tokens)
        if pending >= min(shard_tokens, answer_tokens - done):
            shards.append(folder / f"selfgen-{len(shards):04d}.npz")
            save_shard(
                shards[-1],
                [text.tokens for text in writer.finished],
                [text.roles for text in writer.finished],
                [text.top_ids for text in writer.finished],
                [text.top_logprobs for text in writer.finished],
                begun=writer.begun,
            )
            writer.finished.clear()
            done, pending = done + pending, 0
    return shards


def _questions(arrays: Any, frame: Frame) -> list[tuple[int, ...]]:
    """The questions in a shard, seed words included, without the template around them."""
    tokens, offsets, roles = arrays["tokens"].astype(np.int64), arrays["offsets"], arrays["role"]
    questions = []
    for begin, end in pairwise(offsets):
        answer = int(np.argmax(roles[begin:end] == ANSWER))
        questions.append(tuple(tokens[begin + len(frame.opening) : begin + answer - len(frame.between)].tolist()))
    return questions
