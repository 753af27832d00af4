"""The options that every command shares, and what they become: settings of a run, and a loaded pair.

Nothing heavy is imported before it is needed, so that `--help` and a mistyped option are answered at once. Values are
checked where they are used, in `Settings` and in the loader: a bad one raises a SpecdemoError, one sentence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from .settings import MAX_DRAFT_LENGTH, MAX_FAN_OUT_BUDGET, Settings

if TYPE_CHECKING:
    from .models.loading import Pair

DEFAULTS = Settings()


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which models, and where and how they run."""
    group = parser.add_argument_group("models")
    group.add_argument(
        "--target",
        default="embedded",
        metavar="MODEL",
        help="hub id or local folder of the model that answers (default: the embedded SmolLM2-135M-Instruct)",
    )
    group.add_argument(
        "--draft",
        default="auto",
        metavar="MODEL",
        help="hub id or local folder of the draft model; auto: the one that is known for the target, if any; "
        "none: no draft model (default: auto)",
    )
    group.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16, float16, int8 or auto: what the device is fast at (default: auto)",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, mps or auto (default: auto)")
    group.add_argument(
        "--pair", metavar="NAME", help="a named pair in place of --target and --draft (see plan --list), or auto"
    )
    group.add_argument(
        "--quantize",
        default="auto",
        help="none, int8 or nf4: weights of the target in 8 or 4 bit by bitsandbytes; auto: where it does not fit "
        "otherwise (default: auto)",
    )


def add_decoding_arguments(parser: argparse.ArgumentParser, draft_length: Callable[[str], object] = int) -> None:
    """How to decode. Defaults are those of `Settings`. `draft_length` reads the option of this name."""
    drafting = parser.add_argument_group("drafting")
    drafting.add_argument(
        "--draft-length",
        type=draft_length,
        default=DEFAULTS.draft_length,
        metavar="K",
        help=f"tokens drafted a round, 0 to {MAX_DRAFT_LENGTH} (default: {DEFAULTS.draft_length})",
    )
    drafting.add_argument("--adaptive", action="store_true", help="draft fewer than K tokens where that pays better")
    drafting.add_argument(
        "--verification",
        default=DEFAULTS.verification,
        metavar="token|block",
        help="judge drafted tokens one by one or as a block; both are exact (default: token)",
    )
    ahead = parser.add_argument_group("drafting ahead (ssd)")
    ahead.add_argument(
        "--fan-out",
        default=DEFAULTS.fan_out,
        metavar="RULE",
        help="which outcomes of a verification get a draft: likeliest, geometric or uniform (default: likeliest)",
    )
    ahead.add_argument(
        "--fan-out-budget",
        type=int,
        default=DEFAULTS.fan_out_budget,
        metavar="B",
        help=f"how many, 1 to {MAX_FAN_OUT_BUDGET} (default: {DEFAULTS.fan_out_budget})",
    )
    ahead.add_argument(
        "--saguaro",
        type=float,
        default=DEFAULTS.saguaro,
        metavar="C",
        help="scale the draft's likeliest tokens by C when sampling, which makes outcomes easier to guess (default: 1)",
    )
    ahead.add_argument(
        "--fallback",
        default=DEFAULTS.fallback,
        metavar="NAME",
        help="who drafts where no guess was right: draft-model, or prompt-lookup before it (default: draft-model)",
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=float, default=DEFAULTS.temperature, metavar="T", help="0 is greedy (default: 0)"
    )
    sampling.add_argument(
        "--top-k", type=int, default=DEFAULTS.top_k, metavar="N", help="keep the N likeliest tokens (default: all)"
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=DEFAULTS.top_p,
        metavar="P",
        help="keep the likeliest tokens that together reach probability P (default: 1, all)",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=DEFAULTS.min_p,
        metavar="P",
        help="drop tokens less likely than P times the likeliest (default: 0, none)",
    )
    sampling.add_argument(
        "--repetition-penalty",
        type=float,
        default=DEFAULTS.repetition_penalty,
        metavar="R",
        help="make tokens seen before less likely (default: 1, off)",
    )
    sampling.add_argument(
        "--seed", type=int, default=DEFAULTS.seed, metavar="S", help=f"equal seeds repeat (default: {DEFAULTS.seed})"
    )
    ending = parser.add_argument_group("length and prompt")
    ending.add_argument(
        "--max-new-tokens",
        type=int,
        default=DEFAULTS.max_new_tokens,
        metavar="N",
        help=f"tokens to produce at most (default: {DEFAULTS.max_new_tokens})",
    )
    ending.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; can be given several times"
    )
    ending.add_argument("--ignore-eos", action="store_true", help="go on after the model's end-of-text token")
    ending.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without chat template")


def settings_from(args: argparse.Namespace) -> Settings:
    """The settings that the decoding arguments say. Raises BadRequest."""
    return Settings(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
        draft_length=args.draft_length,
        adaptive=args.adaptive,
        verification=args.verification,
        fan_out=args.fan_out,
        fan_out_budget=args.fan_out_budget,
        saguaro=args.saguaro,
        fallback=args.fallback,
    )


def load_pair_from(args: argparse.Namespace, progress: Callable[[str, float], None] | None = None) -> Pair:
    """Load what the model arguments name, as this machine's memory allows. Raises SpecdemoError."""
    from .plan.load import load_fitting

    return load_fitting(args.target, args.draft, args.pair, args.dtype, args.device, args.quantize, progress)
