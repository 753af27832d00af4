"""Load what the plan says: `--quantize auto` is the ladder of `choose`, walked for this machine before any weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from ..errors import ModelUnavailable
from ..models.loading import Keep, Pair, choose_device, load_pair
from ..models.names import AUTO, EMBEDDED, NONE
from ..models.quantize import KINDS, bitsandbytes_obstacle
from .choose import Plan, Wishes, smaller
from .devices import Machine, this_machine
from .pairs import best_pair, named, plan_pair, shapes_of
from .shape import SizesUnknown
from .sizes import Kept
from .tokenizers import UNSEEN

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it is a plan of: two names, as `--target` and `--draft` say them, on a machine."""

    target: str
    draft: str
    machine: Machine
    wishes: Wishes
    plan: Plan

    def load(self, progress: Progress | None = None) -> Pair:
        """Load as planned; the pair carries the plan and the next smaller one. A context that the plan had to cut is
        then the models' own. Raises ModelUnavailable where it does not fit, BadRequest."""
        plan, machine = self.plan, self.machine
        if not plan.fits:
            raise ModelUnavailable(plan.reason)
        loaded = load_pair(
            self.target,
            self.draft if plan.draft else NONE,
            self.wishes.dtype,
            plan.device_map.get("", machine.devices[0].name),
            progress,
            keep=keep_as(plan.target_kept, plan, machine),
            keep_draft=keep_as(plan.draft_kept, None, machine) if plan.draft_kept else None,
            draft_device=plan.draft_device,
        )
        for model in (loaded.target, loaded.draft):
            if model and plan.context < self.wishes.context:
                model.context_length = min(model.context_length, plan.context)
        plan = replace(plan, notes=tuple(note for note in plan.notes if note != UNSEEN))  # seen by now
        told = () if plan.is_first else (plan.reason,)
        return replace(loaded, plan=plan, smaller=self.smaller(), notes=(*loaded.notes, *told, *plan.notes))

    def smaller(self) -> Planned | None:
        """The next plan down the ladder, for when this one proves too large all the same."""
        wishes = self.wishes
        if find_spec("bitsandbytes") is None:  # looked for, not imported
            wishes = replace(wishes, obstacle="bitsandbytes is not installed")
        plan = smaller(self.plan, *shapes_of(self.target, self.draft), self.machine, wishes)
        return replace(self, plan=replace(plan, fits=True)) if plan else None


def load_fitting(
    target: str = EMBEDDED,
    draft: str = AUTO,
    pair: str | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
    quantize: str = AUTO,
    progress: Progress | None = None,
) -> Pair:
    """Plan for this machine, then load as planned; the pair carries the plan. `pair` is the name of a preset, or "auto"
    for the best that fits. Raises ModelUnavailable where nothing fits, BadRequest, each a sentence for the user."""
    try:
        planned = plan_here(target, draft, pair, dtype, device, quantize)
    except SizesUnknown as unknown:
        target, draft = named(pair, target, draft)
        keep = Keep(dtype, quantize) if quantize in KINDS else None
        loaded = load_pair(target, draft, dtype, device, progress, keep)
        return replace(loaded, notes=(*loaded.notes, str(unknown)))
    return planned.load(progress)


def plan_here(
    target: str = EMBEDDED,
    draft: str = AUTO,
    pair: str | None = None,
    dtype: str = AUTO,
    device: str = AUTO,
    quantize: str = AUTO,
    freed: Mapping[str, int] | None = None,
) -> Planned:
    """The plan that `load_fitting` would load. freed: bytes by device that will be free by then. Raises SpecdemoError,
    SizesUnknown among them."""
    wishes = Wishes(dtype=dtype, quantize=quantize)
    machine = this_machine(choose_device(device), every_card=device == AUTO)
    if freed:
        devices = tuple(
            replace(each, free=min(each.total, each.free + freed.get(each.name, 0))) for each in machine.devices
        )
        machine = replace(machine, devices=devices)
    if pair == AUTO:
        preset, _ = best_pair(machine, wishes)
        pair = preset.name
    target, draft = named(pair, target, draft)
    plan = plan_with_what_works(target, draft, machine, wishes)
    shapes = [shape for shape in shapes_of(target, draft) if shape]
    wishes = replace(wishes, context=min(wishes.context, *(shape.context_length for shape in shapes)))
    return Planned(target, draft, machine, wishes, plan)


def plan_with_what_works(target: str, draft: str, machine: Machine, wishes: Wishes) -> Plan:
    """The plan, made again without bitsandbytes where that was chosen and cannot be used. It is imported only then."""
    plan = plan_pair(target, draft, machine, wishes)
    if "bitsandbytes" not in {kept.forward for kept in (plan.target_kept, plan.draft_kept) if kept}:
        return plan
    obstacle = bitsandbytes_obstacle()
    if obstacle is None:
        return plan
    if wishes.quantize == AUTO:
        return plan_pair(target, draft, machine, replace(wishes, obstacle=obstacle))
    return plan_pair(target, draft, machine, replace(wishes, quantize=NONE, obstacle=obstacle))


def keep_as(kept: Kept, spread: Plan | None, machine: Machine) -> Keep:
    """What the loader is told. `spread`: the plan of a target that may lie on several devices."""
    room: dict[int | str, int] | None = None
    if spread and len(spread.device_map) > 1:
        room = {}
        for device in spread.devices:
            load = spread.loads.get(device.name)
            others = load.total - load.target_weights if load else 0
            index: Any = "cpu" if device.kind == "cpu" else int(device.name.partition(":")[2])
            room[index] = max(0, device.room - others)
    if kept.forward == "bitsandbytes":
        return Keep(kept.compute, kept.precision, room)
    return Keep(kept.precision, NONE, room)
