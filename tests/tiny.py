"""Small things to test decoding with: models that are tables, tokenizers of a few pieces, short ways to run a lane.

A `TableLM` is a language model whose logits are a function of the last two ids. It is fast and its distribution is
known exactly; its cache asserts how it is used and writes down every call.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from specdemo.drafters.base import Drafter
from specdemo.drafters.draft_model import DraftModel
from specdemo.drafters.hybrid import Hybrid
from specdemo.drafters.prompt_lookup import PromptLookup
from specdemo.drafters.ssd import SSD
from specdemo.engines.job import Job
from specdemo.engines.speculative import speculative
from specdemo.engines.standard import standard
from specdemo.events import Drafted, Event, Finished, Prefilled, Verified
from specdemo.models.base import LanguageModel
from specdemo.models.transformers_lm import TransformersLM
from specdemo.settings import Settings
from specdemo.ssd.helper import LocalHelper
from specdemo.text import TokenText, byte_alphabet

# Models that are tables


@dataclass(frozen=True)
class Call:
    """One use of a cache: `count` ids fed after `cached` positions, logits kept of the last `keep`; or a rollback."""

    kind: str
    cached: int
    count: int = 0
    keep: int = 0


class TableLM:
    """`table` [V, V, columns]: logits after (last but one id, last id). Before the first id stands id 0."""

    branching = True

    def __init__(self, table: Tensor, name: str = "table", vocab_ids: Tensor | None = None, context: int = 64) -> None:
        self.table = table
        self.name = name
        self.precision = "float32"
        self.forward_path = "table"
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.vocab_size = table.shape[-1]
        self.vocab_ids = vocab_ids
        self.context_length = context
        self.opened: list[TableCache] = []
        self.fail_at: int | None = None  # raise in the forward with this index, counted over all caches

    def open(self, capacity: int) -> TableCache:
        self.opened.append(TableCache(self, capacity))
        return self.opened[-1]

    @property
    def calls(self) -> list[Call]:
        return [call for cache in self.opened for call in cache.calls]

    @property
    def forwards(self) -> int:
        return sum(call.kind == "extend" for call in self.calls)

    def break_when_told(self) -> None:
        if self.fail_at is not None and self.forwards == self.fail_at:  # counted only where asked: it takes long
            raise RuntimeError("the model broke")


class TableCache:
    def __init__(self, lm: TableLM, capacity: int) -> None:
        self.ids: list[int] = []
        self.calls: list[Call] = []
        self.capacity = capacity
        self.closed = 0
        self._lm = lm

    @property
    def cached(self) -> int:
        return len(self.ids)

    def extend(self, ids: Tensor, keep: int) -> Tensor:
        assert not self.closed, "a closed cache is fed"
        assert ids.ndim == 1
        assert 1 <= keep <= ids.shape[0], f"{keep} rows of {ids.shape[0]} positions"
        assert self.cached + ids.shape[0] <= min(self.capacity, self._lm.context_length), "more than the cache holds"
        self._lm.break_when_told()
        self.calls.append(Call("extend", self.cached, ids.shape[0], keep))
        self.ids += ids.tolist()
        before = [0, *self.ids]
        rows = range(len(self.ids) - keep, len(self.ids))
        return torch.stack([self._lm.table[before[i], self.ids[i]] for i in rows])

    def truncate(self, length: int) -> None:
        assert not self.closed, "a closed cache is rolled back"
        assert length >= 0
        self.calls.append(Call("truncate", self.cached, length))
        del self.ids[length:]

    def branches(self, after: Tensor) -> TableBranches:
        assert not self.closed, "a closed cache branches"
        assert max(after.tolist()) <= self.cached, "a branch continues what is not cached"
        return TableBranches(self._lm, [self.ids[:length] for length in after.tolist()], self.capacity - self.cached)

    def close(self) -> None:
        self.closed += 1


class TableBranches:
    """Continuations of a `TableCache`, which need room behind it."""

    def __init__(self, lm: TableLM, ids: list[list[int]], room: int) -> None:
        self._lm, self._ids, self._room = lm, ids, room

    def extend(self, ids: Tensor) -> Tensor:
        self._room -= len(ids)
        assert self._room >= 0, "more branches than there is room for"
        self._lm.break_when_told()
        for branch, id in zip(self._ids, ids.tolist(), strict=True):
            branch.append(id)
        return torch.stack([self._lm.table[([0, *branch])[-2], branch[-1]] for branch in self._ids])

    def only(self, branch: int) -> None:
        self._ids = [self._ids[branch]]


def random_table(seed: int, vocab: int, scale: float = 1.5, columns: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(vocab, vocab, columns or vocab, generator=generator)


def chain(successors: dict[int, int] | Sequence[int], vocab: int, height: float = 5.0) -> Tensor:
    """A table in which the likeliest token after id i is successors[i] (else i + 1), by a wide margin."""
    table = random_table(0, vocab, scale=0.1)
    steps = successors if isinstance(successors, dict) else dict(enumerate(successors))
    for id in range(vocab):
        table[:, id, steps.get(id, (id + 1) % vocab)] += height
    return table


def joint(table: Tensor, prompt: Sequence[int], length: int) -> dict[tuple[int, ...], float]:
    """The exact distribution at temperature 1 of the `length` tokens after `prompt`."""
    probs = table.double().softmax(-1)
    result = {}
    for ids in itertools.product(range(table.shape[-1]), repeat=length):
        tokens, p = [0, *prompt], 1.0
        for id in ids:
            p *= float(probs[tokens[-2], tokens[-1], id])
            tokens.append(id)
        result[ids] = p
    return result


# Tokenizers


def byte_level(data: bytes) -> str:
    """How a byte-level vocabulary writes these bytes."""
    stand_in = {byte: char for char, byte in byte_alphabet().items()}
    return "".join(stand_in[byte] for byte in data)


def byte_level_tokenizer(pieces: Iterable[bytes | str], special: Sequence[str] = (), **extra: Any) -> Any:
    """Ids in order: the special tokens, then `pieces`."""
    tokens = [byte_level(piece.encode() if isinstance(piece, str) else piece) for piece in pieces]
    vocab = {token: id for id, token in enumerate([*special, *tokens])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **extra)


def sentencepiece_tokenizer(words: Sequence[str] = (), special: Sequence[str] = ("<s>", "</s>")) -> Any:
    """Like Llama 2's: words with their space as U+2581, 256 byte tokens for the rest, one leading space stripped."""
    tokens = ["<unk>", *special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges: list[tuple[str, str]] = []
    singles = sorted({char for word in words for char in word} - set(tokens))
    vocab = {token: id for id, token in enumerate([*tokens, *singles])}
    for word in words:
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if left in vocab and (left, right) not in merges:
                vocab.setdefault(word[:end], len(vocab))
                merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def letters(vocab: int) -> TokenText:
    """Ids 0, 1, 2, ... are written a, b, c, ...; none is special."""
    return TokenText(byte_level_tokenizer(chr(ord("a") + id) for id in range(vocab)))


# Lanes


def as_lm(model: Any, vocab_size: int | None = None, context_length: int | None = None) -> TransformersLM:
    """A transformers model as the engines see it."""
    return TransformersLM(
        model,
        name="tiny",
        precision="float32",
        vocab_size=vocab_size or model.config.vocab_size,
        context_length=context_length or model.config.max_position_embeddings,
    )


def make_job(target: LanguageModel, prompt: Sequence[int], settings: Settings, text: TokenText, **more: Any) -> Job:
    return Job(target=target, text=text, prompt_ids=tuple(prompt), settings=settings, **more)


def drafter_factory(method: str, draft: LanguageModel | None = None) -> Callable[[Job], Drafter]:
    def make(job: Job) -> Drafter:
        if method == "prompt-lookup":
            return PromptLookup(job.target.device)
        assert draft is not None
        if method == "ssd":
            helper = LocalHelper(draft, job.target, job.settings, job.capacity, job.explain)
            return SSD(helper, draft, job.target, job.settings)
        kind = {"speculative": DraftModel, "hybrid": Hybrid}[method]
        return kind(draft, job.target, job.settings, job.capacity)

    return make


def decode(job: Job, method: str = "standard", draft: LanguageModel | None = None) -> list[Event]:
    """All events of a lane."""
    return list(standard(job) if method == "standard" else speculative(job, drafter_factory(method, draft)))


def outcome(events: Sequence[Event]) -> Finished:
    finished = events[-1]
    assert isinstance(finished, Finished)
    return finished


def rounds(events: Sequence[Event]) -> list[tuple[Drafted, Verified]]:
    """The pairs of a lane's rounds, after checking that they come in pairs and in order."""
    drafted = [event for event in events if isinstance(event, Drafted)]
    verified = [event for event in events if isinstance(event, Verified)]
    kinds = [event.type for event in events]
    assert kinds == ["started", "prefilled", *["drafted", "verified"] * len(drafted), "finished"]
    assert [event.round for event in drafted] == [event.round for event in verified] == [*range(1, len(drafted) + 1)]
    return list(zip(drafted, verified, strict=True))


def emitted(verified: Verified) -> int:
    """Tokens that a round gave to the output."""
    return verified.num_accepted + (verified.extra is not None)


def shown_ids(events: Sequence[Event]) -> list[int]:
    """The committed ids as the events tell them."""
    ids: list[int] = []
    for event in events:
        if isinstance(event, Prefilled):
            ids.append(event.token.id)
        elif isinstance(event, Verified):
            ids += [token.id for token in event.judged if token.fate == "accepted"]
            ids += [event.extra.id] if event.extra else []
    return ids


def shown_text(events: Sequence[Event]) -> str:
    """The committed text as the events tell it."""
    text = ""
    for event in events:
        if isinstance(event, Prefilled):
            text += event.token.text
        elif isinstance(event, Verified):
            text += "".join(token.text for token in event.judged if token.fate == "accepted")
            text += event.extra.text if event.extra else ""
    return text


def timeless(events: Sequence[Event]) -> list[Event]:
    """The events without what a clock measured."""
    from dataclasses import replace

    plain: list[Event] = []
    for event in events:
        match event:
            case Prefilled():
                plain.append(replace(event, t=0.0, target_s=0.0, draft_s=0.0))
            case Drafted():
                plain.append(replace(event, t=0.0, draft_s=0.0))
            case Verified():
                ahead = event.speculation and replace(
                    event.speculation, guessed_s=0.0, built_s=0.0, known_s=0.0, build_s=0.0, hidden_s=0.0
                )
                plain.append(replace(event, t=0.0, verify_s=0.0, judge_s=0.0, speculation=ahead))
            case _:
                plain.append(replace(event, t=0.0))
    return plain


def chi_square_p(counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of `counts` under the distribution `expected`; cells that expect fewer than 5 are one cell."""
    total = sum(counts.values())
    assert set(counts) <= {ids for ids, p in expected.items() if p > 0}, "something impossible was produced"
    large = [ids for ids, p in expected.items() if p * total >= 5]
    cells = [(counts.get(ids, 0), expected[ids] * total) for ids in large]
    rest = total * (1.0 - sum(expected[ids] for ids in large))
    if rest >= 1.0:
        cells.append((total - sum(count for count, _ in cells), rest))
    assert len(cells) >= 4, "too few runs to tell anything"
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
