"""`specdemo distill`: from a target to a draft model for it, in one command that can be interrupted.

Generate, train, evaluate, export; each stage leaves its results in `OUT/work`, and `--resume` goes on from there. It
needs torch, transformers and the target's folder, no network, and is the same command on a card and on a processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import BadRequest

_WORK = "work"
_KEPT = ("target", "layers", "intermediate", "vocab", "tokens", "seed")
"""Arguments that a resumed run must not change: the work depends on them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target",
        default="embedded",
        metavar="MODEL",
        help="hub id or local folder of the Llama-like model to draft for (default: the embedded one)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where the draft and the work go")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="the draft's layers (default: 2)")
    parser.add_argument(
        "--intermediate", type=int, default=0, metavar="N", help="width of its MLP (default: 2/3 of the target's)"
    )
    parser.add_argument(
        "--vocab", type=int, default=6144, metavar="N", help="ids that the draft can propose (default: 6144)"
    )
    parser.add_argument(
        "--tokens",
        type=int,
        default=1_000_000,
        metavar="N",
        help="tokens of answers that the target writes as training text (default: 1000000)",
    )
    parser.add_argument("--minutes", type=float, default=60.0, metavar="N", help="of training (default: 60)")
    parser.add_argument(
        "--steps", type=int, metavar="N", help="of training, at most (default: all that the minutes allow)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the work in FOLDER")
    parser.add_argument(
        "--data", type=Path, nargs="+", metavar="FILE", help="train on these shards (npz) and generate nothing"
    )
    parser.add_argument(
        "--exclude",
        type=Path,
        metavar="FILE.jsonl",
        help="prompts that must not be in the training text (default: the evaluation suite)",
    )
    parser.add_argument(
        "--export-plain",
        type=Path,
        metavar="FOLDER",
        help="also write the draft as a plain Llama folder; with a finished draft in --out, only that is done",
    )
    parser.add_argument("--learning-rate", type=float, default=1.2e-3, metavar="R", help="its peak (default: 0.0012)")
    parser.add_argument(
        "--checkpoint-seconds",
        type=float,
        default=180.0,
        metavar="N",
        help="of training between two checkpoints, each with a line of figures (default: 180)",
    )
    parser.add_argument(
        "--slots", type=int, default=0, metavar="N", help="texts written at once (default: 64, on a card 256)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="equal seeds repeat (default: 0)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, mps or auto (default: auto)")
    parser.add_argument("--license", default="", metavar="TEXT", help="the draft's licence, for the card")


def run(args: argparse.Namespace) -> int:
    """Do what the arguments say; returns the exit code. Raises SpecdemoError."""
    from ..models.loading import choose_device, find_model, load_tokenizer
    from ..models.reduced_vocab import is_draft_folder
    from ..terminal import ProgressBar

    _check(args)
    bar = ProgressBar(sys.stderr)
    target = find_model(args.target, bar)
    if args.export_plain and not args.resume and is_draft_folder(args.out):
        from .export import export_plain

        export_plain(args.out, target, args.export_plain)
        _say(bar, f"The plain Llama is in {args.export_plain}.")
        return 0
    work = _open_work(args)
    device = choose_device(args.device)
    tokenizer = load_tokenizer(target, args.target)
    prompts = _prompts(args.exclude)
    shards = list(args.data or _generated(args, target, tokenizer, prompts, device, bar))
    _distilled(args, target, tokenizer, prompts, shards, work, device, bar)
    return 0


def _check(args: argparse.Namespace) -> None:
    for name, least in (("layers", 1), ("vocab", 16), ("tokens", 1), ("slots", 0), ("intermediate", 0)):
        if getattr(args, name) < least:
            raise BadRequest(f"--{name} {getattr(args, name)} is too small: give at least {least}.")
    if args.steps is not None and args.steps < 1:
        raise BadRequest(f"--steps {args.steps} is too small: give at least 1.")
    if not args.minutes > 0 or not args.learning_rate > 0:
        raise BadRequest("--minutes and --learning-rate must be above 0.")
    for path in [*(args.data or []), *([args.exclude] if args.exclude else [])]:
        if not path.is_file():
            raise BadRequest(f"There is no file {path}: check the path.")


def _open_work(args: argparse.Namespace) -> Path:
    """The work folder. A second run needs --resume, and a resumed run the first one's arguments."""
    work = Path(args.out) / _WORK
    kept = {name: getattr(args, name) for name in _KEPT}
    settings = work / "settings.json"
    if settings.exists():
        if not args.resume:
            raise BadRequest(f"{args.out} holds work that was begun: add --resume, or choose another folder.")
        before = json.loads(settings.read_text(encoding="utf-8"))
        changed = [name for name in _KEPT if before.get(name) != kept[name]]
        if changed:
            raise BadRequest(
                f"--{changed[0]} was {before.get(changed[0])} when this work was begun: keep it, or start anew."
            )
    else:
        work.mkdir(parents=True, exist_ok=True)
        settings.write_text(json.dumps(kept), encoding="utf-8")
    return work


def _prompts(file: Path | None) -> list[str]:
    lines = (file or Path(__file__).parent.parent / "data" / "suite.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]) for line in lines if line.strip()]
    return [prompt for prompt in prompts if prompt.strip()]


def _generated(
    args: argparse.Namespace, target: Path, tokenizer: Any, prompts: Sequence[str], device: Any, bar: Any
) -> list[Path]:
    from ..models.loading import eos_ids
    from .generate import generate

    def report(done: int, total: int) -> None:
        bar(f"Writing training text: {done:,} of {total:,} tokens", min(1.0, done / total))

    slots = args.slots or (256 if device.type == "cuda" else 64)
    data = Path(args.out) / _WORK / "data"
    ends = eos_ids(target, tokenizer)
    shard = max(500, min(50_000, args.tokens // 20))
    return generate(data, target, tokenizer, ends, args.tokens, device, slots, args.seed, prompts, shard, report)


def _distilled(
    args: argparse.Namespace,
    target: Path,
    tokenizer: Any,
    prompts: Sequence[str],
    shards: Sequence[Path],
    work: Path,
    device: Any,
    bar: Any,
) -> None:
    import torch

    from ..models.loading import eos_ids
    from .card import Story, write_card
    from .data import frequent_ids, load, occurrences, split, with_questions, without_loops
    from .evaluate import acceptance, agreements, greedy_answers
    from .export import export_draft, export_plain
    from .student import Student, target_parts
    from .train import Recipe, evaluate, train
    from .wiring import wire

    corpus = load(shards)
    training, held_out = split(corpus)
    if not training or not held_out:
        raise BadRequest(f"{len(corpus)} conversations are too few to train and to test on: raise --tokens.")
    parts = target_parts(target)
    size = min(args.vocab, len(parts.embeddings))
    always = sorted(eos_ids(target, tokenizer))
    vocab_ids = torch.tensor(frequent_ids(corpus, training, size, always))
    intermediate = args.intermediate or 2 * parts.shape.intermediate // 3
    student = Student.from_target(parts, args.layers, intermediate, vocab_ids)
    counts = torch.bincount(torch.from_numpy(corpus.tokens).long(), minlength=len(parts.embeddings)).float()
    wired = wire(student, parts, counts)
    circuit = wired and wired.to(device)
    student.to(device)
    recipe = Recipe(
        minutes=args.minutes,
        steps=args.steps,
        learning_rate=args.learning_rate,
        workers=torch.get_num_threads() if device.type == "cpu" else 1,
        checkpoint_seconds=args.checkpoint_seconds,
        seed=args.seed,
    )

    def report(figures: dict[str, float]) -> None:
        _say(
            bar,
            f"step {figures['step']}, {figures['tokens']:,} tokens, {figures['seconds'] / 60:.1f} min: "
            f"loss {figures['loss']:.3f}, agreement {100 * figures['agreement']:.1f} %",
        )

    def tick(share: float) -> None:
        bar("Training", share)

    lessons = with_questions(without_loops(corpus, training), training)
    progress = train(student, lessons, training, held_out[:64], recipe, work, report, tick, circuit, args.resume)
    texts = [corpus.text(i) for i in held_out[:32]]
    name = "SmolLM2-135M-Instruct" if args.target == "embedded" else str(args.target)
    source = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config = export_draft(student, args.out, name, int(source["max_position_embeddings"]), texts, args.license)
    agreed = agreements(student, corpus, greedy_answers(corpus, held_out))
    found = sum(occurrences(corpus, tokenizer.encode(prompt, add_special_tokens=False)) > 0 for prompt in prompts)
    data = "Written by the target itself: it invents a question from a few seed words, then answers it."
    story = Story(
        data=data,
        conversations=len(corpus),
        answer_tokens=corpus.answer_tokens(),
        recipe=recipe,
        progress=progress,
        held_out=evaluate(student, corpus, held_out),
        acceptance={k: acceptance(agreed, k) for k in range(1, 9)},
        suite_prompts=(len(prompts), found),
        wired=circuit is not None,
    )
    write_card(args.out, config, story)
    _say(
        bar, f"The draft is in {args.out}: alpha {story.acceptance[4].alpha:.2f} at draft length 4 on held-out answers."
    )
    if args.export_plain:
        export_plain(args.out, target, args.export_plain)
        _say(bar, f"The plain Llama is in {args.export_plain}.")


def _say(bar: Any, text: str) -> None:
    bar.clear()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
