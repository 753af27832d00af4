"""`python -m specdemo plan`: a table of what goes where in which precision, or the same as JSON. Nothing is loaded."""

from __future__ import annotations

import argparse
import json
import sys

from ..models.names import AUTO, EMBEDDED
from ..presets import PRESETS
from ..terminal import table
from .choose import DEFAULT_CONTEXT, QUANTIZE_CHOICES, Plan, Wishes, bars, choose, gib
from .devices import Device, Machine, machine_of
from .pairs import best_pair, named, plan_pair, shapes_of
from .sizes import LANES

PARTS = {
    "target_weights": "target, weights",
    "draft_weights": "draft, weights",
    "target_kv": f"target, {LANES} caches",
    "draft_kv": "draft, cache",
    "workspace": "work space",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=EMBEDDED, metavar="MODEL", help="hub id or folder (default: embedded)")
    parser.add_argument("--draft", default=AUTO, metavar="MODEL", help="hub id, folder, auto or none (default: auto)")
    parser.add_argument("--pair", metavar="NAME", help="a named pair, or auto: the best that fits")
    parser.add_argument(
        "--memory",
        metavar="SIZES",
        help="plan for cards of these sizes, as 24GiB or 24GiB,24GiB, with cpu=64GiB for the system's memory "
        "(default: what is free on this machine)",
    )
    parser.add_argument(
        "--context", type=_context, default=DEFAULT_CONTEXT, metavar="N", help="positions of each cache"
    )
    parser.add_argument("--dtype", default=AUTO, help="float32, bfloat16, float16, int8 or auto (default: auto)")
    parser.add_argument("--quantize", default=AUTO, choices=QUANTIZE_CHOICES, help="default: auto, where needed")
    parser.add_argument("--device", default=AUTO, help="cpu, cuda, cuda:1, mps or auto (default: auto)")
    parser.add_argument("--list", action="store_true", help="list the named pairs, with what each needs")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    if args.list:
        _print(_list_json(args) if args.json else _list_table(args))
        return 0
    wishes = Wishes(args.context, args.dtype, args.quantize)
    machine = machine_of(args.memory) if args.memory else _here(args.device)
    if args.pair == AUTO:
        preset, plan = best_pair(machine, wishes)
        target, draft = preset.target, preset.draft
    else:
        target, draft = named(args.pair, args.target, args.draft)
        plan = _plan(target, draft, machine, wishes, here=not args.memory)
    access = [preset.access for preset in PRESETS.values() if preset.target == target and preset.gated][:1]
    if args.json:
        _print(json.dumps({**plan.as_json(), "access": access[0] if access else None}))
    else:
        _print("\n".join([_table(plan), "", plan.reason, *plan.notes, *access]))
    return 0


def _plan(target: str, draft: str, machine: Machine, wishes: Wishes, here: bool) -> Plan:
    """For this machine, with what is installed on it; for another one, as if everything were."""
    if not here:
        return plan_pair(target, draft, machine, wishes)
    from .load import plan_with_what_works

    return plan_with_what_works(target, draft, machine, wishes)


def _here(device: str) -> Machine:
    from ..models.loading import choose_device
    from .devices import this_machine

    return this_machine(choose_device(device), every_card=device == AUTO)


def _table(plan: Plan) -> str:
    """Rows of parts, a column for each device."""
    kept = {"target": plan.target_kept, "draft": plan.draft_kept}
    columns = bars(plan)
    rows = []
    for part, title in PARTS.items():
        model = kept.get(part.partition("_")[0])
        sizes = [_size(bar, part) for bar in columns]
        if any(sizes):
            precision = (model.precision if part.endswith("weights") else model.compute) if model else ""
            rows.append([title, precision, *(gib(size) for size in sizes)])
    names = [bar["device"] for bar in columns]
    loads = [plan.loads[name].total if name in plan.loads else 0 for name in names]
    rows.append(["total", "", *(gib(load) for load in loads)])
    rows.append(["free", "", *(gib(device.free) for device in plan.devices)])
    rows.append(["of it kept free", "", *(gib(device.margin) for device in plan.devices)])
    head = f"{plan.target} + {plan.draft or 'no draft model'}, {plan.context:,} positions"
    return head + "\n\n" + table(["", "precision", *names], rows)


def _size(bar: dict[str, object], part: str) -> int:
    parts = bar["parts"]
    assert isinstance(parts, list)
    return sum(int(entry["bytes"]) for entry in parts if entry["name"] == part)


# -- the named pairs ---------------------------------------------------------------------------------------------------

_ANY_SIZE = 1 << 50
_LISTED = ("bfloat16", "int8", "nf4")


def _needs(args: argparse.Namespace) -> dict[str, dict[str, int]]:
    """Pair -> bytes on one card with the target in 16, 8 and 4 bit and the draft in 16."""
    machine = Machine((Device("cuda:0", _ANY_SIZE, _ANY_SIZE),))
    found: dict[str, dict[str, int]] = {}
    for preset in PRESETS.values():
        shapes = shapes_of(preset.target, preset.draft)
        found[preset.name] = {
            precision: choose(
                *shapes, machine, Wishes(args.context, quantize="none" if precision == "bfloat16" else precision)
            ).bytes.total
            for precision in _LISTED
        }
    return found


def _list_json(args: argparse.Namespace) -> str:
    needs = _needs(args)
    listed = [
        {
            "name": preset.name,
            "target": preset.target,
            "draft": preset.draft,
            "gated": preset.gated,
            "access": preset.access or None,
            "note": preset.note or None,
            "bytes": needs[preset.name],
        }
        for preset in PRESETS.values()
    ]
    return json.dumps(listed)


def _list_table(args: argparse.Namespace) -> str:
    needs = _needs(args)
    rows = [
        [preset.name, preset.target, preset.draft, *(gib(needs[preset.name][name]) for name in _LISTED)]
        for preset in PRESETS.values()
    ]
    gated = ", ".join(preset.name for preset in PRESETS.values() if preset.gated)
    head = ["pair", "target", "draft", "16 bit", "target in 8 bit", "target in 4 bit"]
    return table(head, rows) + f"\n\nGated, to be asked for on the hub: {gated}."


def _context(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, not {text!r}")
    return int(text)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
