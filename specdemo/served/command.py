"""The options of `serve-plan`, and what it prints."""

from __future__ import annotations

import argparse
import json
import sys

from ..models.names import AUTO, EMBEDDED
from ..plan.choose import gib
from ..plan.pairs import named, shapes_of
from .plan import TITLES, Wanted, cluster_of, plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    usual = Wanted()
    parser.add_argument("--pair", metavar="NAME", help="a named pair (see plan --list)")
    parser.add_argument("--target", default=EMBEDDED, metavar="MODEL", help="hub id or folder")
    parser.add_argument("--draft", default=AUTO, metavar="MODEL", help="hub id, folder, or none")
    parser.add_argument("--gpus", required=True, metavar="CARDS", help="of each node, such as 8x80GiB")
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--engine", choices=("vllm", "llama.cpp"), default="vllm", help="default: vllm")
    parser.add_argument("--drafter", choices=("draft", "ngram", "eagle"), default=usual.drafter, help="default: draft")
    parser.add_argument("--head", metavar="MODEL", help="the EAGLE head, hub id or folder")
    parser.add_argument("--draft-length", type=int, default=usual.draft_length, metavar="K", help="default: 5")
    parser.add_argument("--context", type=int, default=usual.context, metavar="N", help="positions of each cache")
    parser.add_argument(
        "--sequences", type=int, default=usual.sequences, metavar="N", help="requests that a server decodes at once"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines for a shell")


def run(args: argparse.Namespace) -> int:
    cluster = cluster_of(args.gpus, args.nodes)
    target, draft = shapes_of(*named(args.pair, args.target, args.draft))
    wanted = Wanted(args.drafter, args.head, args.draft_length, args.context, args.sequences)
    split, commands, notes = plan(args.engine, cluster, target, draft, wanted)
    if args.json:
        document = {
            "precision": split.precision,
            "tensor_parallel": split.tensor,
            "pipeline_parallel": split.pipeline,
            "cards_a_server": split.cards,
            "bytes_a_server": split.bytes,
            "commands": [{"about": command.about, "words": list(command.words)} for command in commands],
            "notes": notes,
        }
        sys.stdout.write(json.dumps(document) + "\n")
        return 0
    cards = f"{split.cards} of {cluster.cards * cluster.nodes} cards for each server"
    sys.stdout.write(
        f"# {target.name} in {TITLES[split.precision]}: {gib(split.bytes)} with the caches of {wanted.sequences} "
        f"requests of {wanted.context:,} positions, {cards}\n"
    )
    for command in commands:
        sys.stdout.write(f"\n# {command.about}\n{command}\n")
    for note in notes:
        sys.stderr.write(f"{note}\n")
    return 0
