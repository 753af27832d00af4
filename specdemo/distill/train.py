"""Teach a draft: AdamW under a budget of minutes, with the learning rate falling to zero as the budget ends.

The falling rate is worth several points of agreement, so the schedule follows the clock and not a number of steps:
whatever the machine manages, training ends annealed. A checkpoint holds all that is needed to go on after a kill.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .data import Batch, Corpus, collate, grouped
from .student import Student
from .wiring import Circuit

CHECKPOINT, LOG = "checkpoint.pt", "log.jsonl"

_HOLD_OFFSETS_EVERY = 8  # steps: the one projection that costs something, and steps are small
_OFFSETS_RATE = 0.1  # of the learning rate: a rare token's few gradients would throw it far


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to train. minutes: of training, evaluation not counted. steps: end after so many, if the minutes allow.
    learning_rate: at its peak. warmup, hold, release: as shares of the budget, whichever of the two it is."""

    minutes: float
    steps: int | None = None
    learning_rate: float = 1.2e-3
    tokens_per_batch: int = 1600
    workers: int = 1  # threads, each on its share of a batch
    warmup: float = 0.02  # until the rate is at its peak
    hold: float = 0.3  # until it begins to fall
    release: float = 0.8  # until then a wired circuit is held
    weight_decay: float = 0.1
    clip: float = 1.0
    checkpoint_seconds: float = 180.0
    seed: int = 0


@dataclass(slots=True)
class Progress:
    """Where training stands."""

    step: int = 0
    tokens: int = 0  # seen, padding not counted
    seconds: float = 0.0  # of training
    epoch: int = 0
    batch: int = 0  # of this epoch, next


def schedule(done: float, recipe: Recipe) -> float:
    """The learning rate's factor at the share `done` of the budget: up, level, down to zero."""
    if done < recipe.warmup:
        return max(done / recipe.warmup, 0.01)
    if done < recipe.hold:
        return 1.0
    return max(0.0, (1.0 - done) / (1.0 - recipe.hold))


def evaluate(student: Student, corpus: Corpus, conversations: Sequence[int]) -> dict[str, float]:
    """Agreement with the target's argmax, sum of min(p, q) and loss over the answers of some conversations."""
    device = student.norm.device
    agreed, overlap, loss, rows = 0, 0.0, 0.0, 0
    lengths = corpus.lengths()
    order = sorted(conversations, key=lambda i: int(lengths[i]))
    with torch.no_grad():
        for start in range(0, len(order), 16):
            batch = collate(corpus, order[start : start + 16]).to(device)
            a, o, n = student.agreement(batch)
            loss += float(student.loss(batch))
            agreed, overlap, rows = agreed + a, overlap + o, rows + n
    return {"agreement": agreed / rows, "overlap": overlap / rows, "loss": loss / rows, "rows": rows}


def train(
    student: Student,
    corpus: Corpus,
    conversations: Sequence[int],
    held_out: Sequence[int],
    recipe: Recipe,
    folder: Path,
    report: Callable[[dict[str, float]], None],
    tick: Callable[[float], None] = lambda share: None,
    circuit: Circuit | None = None,
    resume: bool = False,
) -> Progress:
    """Train in place until the budget ends; checkpoints and a log go to `folder`.

    held_out: what the log's figures are taken on. report: called with the figures of each log line. tick: called with
    the share of the budget that is spent. circuit: held as it is until `recipe.release`. resume: go on
    from the folder's checkpoint where there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    optimizer = _optimizer(student, recipe)
    progress = Progress()
    if resume and (folder / CHECKPOINT).exists():
        progress = _restore(folder / CHECKPOINT, student, optimizer)

    def keep() -> None:
        figures = {**asdict(progress), **evaluate(student, corpus, held_out)}
        figures["tokens_per_second"] = progress.tokens / max(progress.seconds, 1e-9)
        _save(folder / CHECKPOINT, student, optimizer, progress)  # before the log, which must not tell of lost steps
        with (folder / LOG).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({name: round(value, 5) for name, value in figures.items()}) + "\n")
        report(figures)

    if progress.step == 0:
        keep()
    kept_at = progress.seconds

    def spent() -> float:
        return max(progress.seconds / (60 * recipe.minutes), progress.step / recipe.steps if recipe.steps else 0.0)

    with _one_thread_each(recipe.workers) as pool:
        while spent() < 1.0:
            size = recipe.tokens_per_batch // recipe.workers
            groups = grouped(corpus, conversations, size, recipe.seed + progress.epoch)
            while progress.batch * recipe.workers < len(groups) and spent() < 1.0:
                began = time.perf_counter()
                first = progress.batch * recipe.workers
                together = [collate(corpus, group) for group in groups[first : first + recipe.workers]]
                for parameters in optimizer.param_groups:
                    parameters["lr"] = parameters["share"] * recipe.learning_rate * schedule(spent(), recipe)
                _backward(student, together, pool)
                torch.nn.utils.clip_grad_norm_(student.parameters(), recipe.clip)
                optimizer.step()
                if circuit is not None and spent() < recipe.release:
                    circuit.hold(student)
                    if progress.step % _HOLD_OFFSETS_EVERY == 0:
                        circuit.hold_offsets(student)
                progress.step += 1
                progress.batch += 1
                progress.tokens += sum(batch.tokens for batch in together)
                progress.seconds += time.perf_counter() - began
                tick(min(1.0, spent()))
                if progress.seconds - kept_at >= recipe.checkpoint_seconds:
                    keep()
                    kept_at = progress.seconds
            if progress.batch * recipe.workers >= len(groups):
                progress.epoch, progress.batch = progress.epoch + 1, 0
    if kept_at < progress.seconds:
        keep()
    return progress


def _backward(student: Student, together: Sequence[Batch], pool: ThreadPoolExecutor) -> None:
    """Set the gradients of the mean loss over some batches, one thread each.

    Threads over batches beat threads inside each operation: nobody waits at every small step for a core that
    another program has taken.
    """
    parameters = list(student.parameters())
    device = student.norm.device

    def gradients(batch: Batch) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(student.loss(batch.to(device)), parameters)

    rows = sum(len(batch.rows) for batch in together)
    for parameter, *parts in zip(parameters, *pool.map(gradients, together), strict=True):
        parameter.grad = sum(parts[1:], start=parts[0]).div_(rows)


@contextmanager
def _one_thread_each(workers: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of workers; while there are several, torch's operations use one thread each."""
    threads = torch.get_num_threads()
    if workers > 1:
        torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def _optimizer(student: Student, recipe: Recipe) -> torch.optim.Optimizer:
    rest = [p for name, p in student.named_parameters() if name != "offsets"]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": recipe.weight_decay, "share": 1.0},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0, "share": 1.0},
        {"params": [student.offsets], "weight_decay": 0.0, "share": _OFFSETS_RATE},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), eps=1e-8, fused=True)


def _save(path: Path, student: Student, optimizer: torch.optim.Optimizer, progress: Progress) -> None:
    """Write a checkpoint, whole or not at all."""
    state = {"student": student.state_dict(), "optimizer": optimizer.state_dict(), "progress": asdict(progress)}
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def _restore(path: Path, student: Student, optimizer: torch.optim.Optimizer) -> Progress:
    state = torch.load(path, map_location=student.norm.device, weights_only=True)
    student.load_state_dict(state["student"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])
