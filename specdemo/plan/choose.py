"""Where both models fit, and in which precision: the first rung of a ladder that holds.

Both in 16 bit; the target in 8 bit, then in 4, the draft untouched; both in 4; the target's layers spread over several
cards; without the draft model; with layers waiting in the system's memory; with a smaller context; and then a refusal.
Where there are several cards, every rung first tries one for each model, so that the draft model can work while the
target does. Nothing here loads or measures: shapes and free memory go in, a `Plan` comes out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from ..errors import BadRequest
from ..models.names import draft_precision
from .devices import Device, Machine
from .shape import ModelShape
from .sizes import GIB, LANES, Kept, embedding_bytes, kv_bytes, module_bytes, weight_bytes, workspace_bytes

AUTO, NONE = "auto", "none"
DTYPE_CHOICES = (AUTO, "float32", "bfloat16", "float16", "int8")
QUANTIZE_CHOICES = (AUTO, NONE, "int8", "nf4")
DEFAULT_CONTEXT, SMALLEST_CONTEXT = 4096, 512
NO_SECOND_CARD = "No other card has room for the draft model, so it shares the target's."
BUS_BYTES_PER_S = 16e9
"""At which a layer that waits in the system's memory is copied to a card: PCIe 4.0 x16 reaches a little more."""

PRECISIONS: Mapping[str, tuple[str, str]] = {
    "auto": (AUTO, AUTO),
    "half": (AUTO, NONE),
    "float32": ("float32", NONE),
    "lean8": ("int8", NONE),
    "int8": (AUTO, "int8"),
    "nf4": (AUTO, "nf4"),
}
"""One word for how a target is kept -> `--dtype` and `--quantize`. `lean8` is the lean forward's own 8 bit on a
processor, `int8` and `nf4` are bitsandbytes'."""

PRECISION_TITLES = {"int8": "8 bit", "nf4": "4 bit (NF4)"}


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asks for. `dtype` as `--dtype`, `quantize` as `--quantize`; `obstacle`: why bitsandbytes cannot be
    used, or None. Raises BadRequest for a word that is none of the choices."""

    context: int = DEFAULT_CONTEXT
    dtype: str = AUTO
    quantize: str = AUTO
    obstacle: str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_CHOICES:
            raise BadRequest(f"There is no dtype {self.dtype!r}: choose one of {', '.join(DTYPE_CHOICES)}.")
        if self.quantize not in QUANTIZE_CHOICES:
            raise BadRequest(f"There is no --quantize {self.quantize!r}: choose one of {', '.join(QUANTIZE_CHOICES)}.")


@dataclass(frozen=True, slots=True)
class Bytes:
    """`target_kv` is that of all lanes; the other caches and the work space are there once."""

    target_weights: int = 0
    draft_weights: int = 0
    target_kv: int = 0
    draft_kv: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.target_weights + self.draft_weights + self.target_kv + self.draft_kv + self.workspace

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class Plan:
    """`device_map`: module of the target -> device, "" for the whole of it. `loads`: what each device then holds.
    `draft` is None where no draft model runs. `reason` is one sentence;
    `notes` are more of them. `is_first`: nothing had to be given up."""

    target: str
    draft: str | None
    context: int
    target_kept: Kept
    draft_kept: Kept | None
    device_map: Mapping[str, str]
    draft_device: str | None
    loads: Mapping[str, Bytes]
    devices: tuple[Device, ...]
    fits: bool
    reason: str
    is_first: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def bytes(self) -> Bytes:
        return sum(self.loads.values(), Bytes())

    @property
    def described(self) -> str:
        """What to load, in the middle of a sentence."""
        target = PRECISION_TITLES.get(self.target_kept.precision, self.target_kept.precision)
        draft = self.draft_kept and PRECISION_TITLES.get(self.draft_kept.precision, self.draft_kept.precision)
        need = gib(self.bytes.total)
        if draft is None:
            return f"the target in {target} and no draft model, which takes {need}"
        return f"the target in {target} and the draft model in {draft}, which takes {need}"

    @property
    def quantize(self) -> str:
        """The `--quantize` that leads to this plan."""
        return self.target_kept.precision if self.target_kept.forward == "bitsandbytes" else NONE

    @property
    def offloaded(self) -> int:
        """Bytes of weights that wait in the system's memory while the cards work."""
        return self.loads["cpu"].target_weights if "cpu" in self.loads and len(self.loads) > 1 else 0

    def as_json(self) -> dict[str, Any]:
        """The plan as `plan --json` prints it."""
        sizes = self.bytes
        named = {name: getattr(sizes, name) for name in sizes.__dataclass_fields__}
        return {
            "choice": {
                "target": _kept_json(self.target, self.target_kept),
                "draft": self.draft_kept and _kept_json(self.draft or "", self.draft_kept),
                "device_map": dict(self.device_map) if len(self.device_map) > 1 else self.device_map[""],
                "draft_device": self.draft_device,
                "context": self.context,
            },
            "bytes": {**named, "total": sizes.total},
            "fits": self.fits,
            "reason": self.reason,
            "notes": list(self.notes),
            "devices": bars(self),
        }


def _kept_json(name: str, kept: Kept) -> dict[str, str]:
    return {"name": name, "precision": kept.precision, "forward": kept.forward, "compute": kept.compute}


def bars(plan: Plan) -> list[dict[str, Any]]:
    """The plan as one bar a device: `parts` of `bytes` each that add up to `total`, the last ones what others use and
    what stays free. A part that is more than there is makes the free part 0."""
    found = []
    for device in plan.devices:
        load = plan.loads.get(device.name, Bytes())
        parts = [{"name": name, "bytes": getattr(load, name)} for name in load.__dataclass_fields__]
        parts.append({"name": "others", "bytes": device.total - device.free})
        parts.append({"name": "free", "bytes": max(0, device.free - load.total)})
        found.append({"device": device.name, "total": device.total, "margin": device.margin, "parts": parts})
    return found


def gib(number: int) -> str:
    return f"{number / GIB:.1f} GiB"


# -- the ladder --------------------------------------------------------------------------------------------------------


def choose(target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes | None = None) -> Plan:
    """The first plan that fits, or the smallest one with `fits` False. The context is cut to what both models take."""
    wishes = wishes or Wishes()
    longest = min(shape.context_length for shape in (target, draft) if shape)
    wishes = replace(wishes, context=min(wishes.context, longest))
    ladder = _Ladder(target, draft, machine, wishes)
    notes = [*machine.notes]
    if wishes.obstacle:
        notes.append(wishes.obstacle)
    last = None
    for last in ladder.plans():
        if last.fits:
            break
    assert last is not None
    return replace(last, notes=(*last.notes, *notes))


def choose_whole(target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes) -> Plan | None:
    """The first plan that fits with the draft model, the whole context and nothing waiting elsewhere, or None."""
    longest = min(shape.context_length for shape in (target, draft) if shape)
    ladder = _Ladder(target, draft, machine, replace(wishes, context=min(wishes.context, longest)))
    return next((plan for plan in ladder.whole_plans(draft) if plan.fits), None)


def smaller(plan: Plan, target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes) -> Plan | None:
    """The next plan down the ladder that needs less than `plan`, whatever is free; None at its foot. For when a plan
    that should have fitted did not."""
    ladder = _Ladder(target, draft, machine, replace(wishes, context=plan.context))
    return next((other for other in ladder.plans() if other.bytes.total < plan.bytes.total), None)


class _Ladder:
    def __init__(self, target: ModelShape, draft: ModelShape | None, machine: Machine, wishes: Wishes) -> None:
        self._target, self._draft = target, draft
        self._machine, self._wishes = machine, wishes
        self._cards = sorted(machine.devices, key=lambda device: -device.room)
        self._first = self._cards[0]
        self._context = wishes.context
        self._first_plan: Plan | None = None

    def plans(self) -> Iterator[Plan]:
        """Every plan in the order of preference, whether it fits or not."""
        drafts = [self._draft, None] if self._draft else [None]
        for draft in drafts:
            yield from self.whole_plans(draft)
        if self._machine.host and self._first.kind != "cpu":
            for draft in drafts:
                yield self._offloaded(draft)
        while self._context > SMALLEST_CONTEXT:
            self._context = max(SMALLEST_CONTEXT, self._context // 2)
            yield from self.whole_plans(None)

    def whole_plans(self, draft: ModelShape | None) -> Iterator[Plan]:
        """Everything on the devices themselves."""
        yield from self._unspread(draft)
        yield from self._on_several(draft)

    def _unspread(self, draft: ModelShape | None) -> Iterator[Plan]:
        """Each model on a device as a whole: with several cards on one each where that fits, else both on one."""
        apart = list(permutations(self._cards, 2)) if draft else []
        for precisions in self._rungs(self._first, draft):
            plans = (self._placed(draft, precisions, *devices) for devices in apart)
            if found := next((plan for plan in plans if plan.fits), None):
                note = f"The draft model has a card of its own, {found.draft_device}."
                yield self._told(replace(found, notes=(note,)))
                continue
            for device in self._cards:
                plan = self._placed(draft, precisions, device, device)
                yield self._told(replace(plan, notes=(NO_SECOND_CARD,)) if apart and plan.fits else plan)
                if plan.fits:
                    break

    def _placed(self, draft: ModelShape | None, precisions: tuple[str, str], device: Device, own: Device) -> Plan:
        """The target on `device`, the draft model on `own`: there with a copy of the embeddings that it shares."""
        kept = self._kept(self._target, precisions[0], device)
        weights, cache = weight_bytes(self._target, kept), LANES * kv_bytes(self._target, kept, self._context)
        workspace = workspace_bytes(self._target, kept, self._context, LANES)
        loads = {device.name: Bytes(target_weights=weights, target_kv=cache, workspace=workspace)}
        draft_kept = self._draft_kept(draft, precisions[1], kept, own) if draft else None
        if draft and draft_kept:
            weights, cache = weight_bytes(draft, draft_kept), kv_bytes(draft, draft_kept, self._context)
            if draft.shares_embedding and own != device:
                weights += embedding_bytes(self._target, kept)
            workspace = workspace_bytes(draft, draft_kept, self._context, 1)
            load = Bytes(draft_weights=weights, draft_kv=cache, workspace=workspace)
            loads[own.name] = loads.get(own.name, Bytes()) + load
        room = {device.name: device.room, own.name: own.room}
        fits = all(load.total <= room[name] for name, load in loads.items())
        return self._plan(kept, draft, draft_kept, {"": device.name}, own.name, loads, fits)

    def _on_several(self, draft: ModelShape | None) -> Iterator[Plan]:
        if len(self._cards) > 1:
            for precisions in self._rungs(self._first, draft):
                yield self._spread(draft, precisions, self._cards)

    def _offloaded(self, draft: ModelShape | None) -> Plan:
        assert self._machine.host is not None
        half = self._half(self._target, self._first)
        return self._spread(draft, (half, half), [*self._cards, self._machine.host])

    def _spread(self, draft: ModelShape | None, precisions: tuple[str, str], devices: list[Device]) -> Plan:
        """The draft model on the first device, then the target's modules in order, each device filled to its room. Keys
        and values lie with their layer, and every device needs the work space."""
        kept = replace(
            self._kept(self._target, precisions[0], self._first), forward=self._spread_forward(precisions[0])
        )
        kept = replace(kept, compute=self._half(self._target, self._first))
        draft_kept = self._draft_kept(draft, precisions[1], kept, self._first) if draft else None
        workspace = self._workspace(kept, draft, draft_kept)
        loads = {device.name: Bytes() for device in devices}
        if draft and draft_kept:
            cache = kv_bytes(draft, draft_kept, self._context)
            loads[devices[0].name] += Bytes(draft_weights=weight_bytes(draft, draft_kept), draft_kv=cache)
        layer_kv = LANES * kv_bytes(self._target, kept, self._context) // self._target.layers
        device_map: dict[str, str] = {}
        waiting = list(devices)
        for module, size in module_bytes(self._target, kept).items():
            share = Bytes(target_weights=size, target_kv=layer_kv if module[-1].isdigit() else 0)
            while len(waiting) > 1 and (loads[waiting[0].name] + share).total + workspace > waiting[0].room:
                waiting.pop(0)
            loads[waiting[0].name] += share
            device_map[module] = waiting[0].name
        loads = {name: load + Bytes(workspace=workspace) for name, load in loads.items() if load.total}
        fits = all(loads[device.name].total <= device.room for device in devices if device.name in loads)
        plan = self._plan(kept, draft, draft_kept, device_map, devices[0].name, loads, fits)
        return self._told(plan)

    def _spread_forward(self, precision: str) -> Any:
        return "bitsandbytes" if precision in ("int8", "nf4") else "transformers"

    def _plan(
        self,
        kept: Kept,
        draft: ModelShape | None,
        draft_kept: Kept | None,
        device_map: Mapping[str, str],
        draft_device: str,
        loads: Mapping[str, Bytes],
        fits: bool,
    ) -> Plan:
        devices = self._machine.devices
        if "cpu" in loads and self._machine.host and self._machine.host not in devices:
            devices = (*devices, self._machine.host)
        return Plan(
            target=self._target.name,
            draft=draft.name if draft else None,
            context=self._context,
            target_kept=kept,
            draft_kept=draft_kept,
            device_map=device_map,
            draft_device=draft_device if draft else None,
            loads=loads,
            devices=devices,
            fits=fits,
            reason="",
        )

    # -- precisions ----------------------------------------------------------------------------------------------------

    def _rungs(self, device: Device, draft: ModelShape | None) -> Iterator[tuple[str, str]]:
        """Precisions of target and draft, the largest first."""
        quantize = self._wishes.quantize
        half = self._half(self._target, device)
        draft_half = self._half(draft, device) if draft else half
        if quantize in (AUTO, NONE):
            yield half, draft_half
            if half == "float32" and self._wishes.dtype == AUTO:
                yield "bfloat16", "bfloat16"  # slower on a processor, half as large
        wanted = ("int8", "nf4") if quantize == AUTO else () if quantize == NONE else (quantize,)
        possible = [precision for precision in wanted if self._can(precision, device)]
        for precision in possible:
            yield precision, draft_half
        if possible and draft and not draft.shares_embedding:
            yield possible[-1], possible[-1]

    def _can(self, precision: str, device: Device) -> bool:
        if precision == "int8" and self._lean_int8(self._target, device):
            return True
        return self._wishes.obstacle is None and (device.int8 if precision == "int8" else device.nf4)

    def _lean_int8(self, shape: ModelShape, device: Device) -> bool:
        return shape.lean and device.kind == "cpu" and self._machine.lean_int8 and self._wishes.quantize == AUTO

    def _half(self, shape: ModelShape, device: Device) -> str:
        if self._wishes.dtype != AUTO:
            return self._wishes.dtype
        return "float32" if device.kind == "cpu" and not shape.lean else device.half

    def _kept(self, shape: ModelShape, precision: str, device: Device) -> Kept:
        if precision == "int8" and (self._lean_int8(shape, device) or self._wishes.dtype == "int8"):
            return Kept(precision, "lean", "float32", device.kind)
        if precision in ("int8", "nf4"):
            compute = "float32" if device.kind == "cpu" else device.half
            return Kept(precision, "bitsandbytes", compute, device.kind)
        if not shape.lean:
            return Kept(precision, "transformers", precision, device.kind)
        widened = device.kind == "cpu" and precision == "float16"
        return Kept(precision, "lean", "float32" if widened else precision, device.kind)

    def _draft_kept(self, draft: ModelShape, precision: str, target: Kept, device: Device) -> Kept:
        """A distilled draft runs as its target does, where that is the lean forward, in its precision or less."""
        if not draft.shares_embedding:
            return self._kept(draft, precision, device)
        kept = target if target.forward == "lean" else self._kept(draft, precision, device)
        return replace(kept, precision=draft_precision(kept.precision, kept.device_kind))

    def _workspace(self, kept: Kept, draft: ModelShape | None, draft_kept: Kept | None) -> int:
        space = workspace_bytes(self._target, kept, self._context, LANES)
        return space + (workspace_bytes(draft, draft_kept, self._context, 1) if draft and draft_kept else 0)

    # -- sentences -----------------------------------------------------------------------------------------------------

    def _told(self, plan: Plan) -> Plan:
        """The plan with its sentence; the first one made is remembered."""
        if self._first_plan is None:
            plan = self._first_plan = replace(plan, is_first=True)
        return replace(plan, reason=self._reason(plan))

    def _reason(self, plan: Plan) -> str:
        need, room = gib(plan.bytes.total), gib(sum(d.room for d in plan.devices if d.name in plan.loads))
        where, how = " and ".join(plan.loads), self._how(plan)
        if not plan.fits:
            return f"{plan.target} does not fit: {how} it needs {need}, and {where} can give {room}."
        how = how[0].upper() + how[1:]
        if plan.offloaded:
            seconds = plan.offloaded / BUS_BYTES_PER_S
            return (
                f"{how} the models take {need}, with {gib(plan.offloaded)} of the target waiting in the system's "
                f"memory: every forward copies them to the card, some {seconds:.1f} s each time at "
                f"{BUS_BYTES_PER_S / 1e9:.0f} GB/s."
            )
        facts = []
        if self._first_plan and not plan.is_first:
            better = self._how(self._first_plan)
            if better == self._how(plan):
                facts.append("no device alone has room for them")
            else:
                facts.append(f"{better} they would take {gib(self._first_plan.bytes.total)}")
        if self._draft and plan.draft is None:
            facts.append("the draft model is given up, and prompt lookup drafts without one")
        if plan.context < self._wishes.context:
            facts.append(f"the context shrinks from {self._wishes.context:,} to {plan.context:,} positions")
        if not facts:
            return f"{how} the models take {need} of the {room} that {where} can give."
        return f"{how} the models take {need} of the {room} that {where} can give; {'; '.join(facts)}."

    def _how(self, plan: Plan) -> str:
        target = PRECISION_TITLES.get(plan.target_kept.precision, plan.target_kept.precision)
        if plan.draft_kept is None:
            return f"with the target in {target}" + (" and no draft model" if self._draft else "")
        draft = PRECISION_TITLES.get(plan.draft_kept.precision, plan.draft_kept.precision)
        return f"with both in {target}" if draft == target else f"with the target in {target} and the draft in {draft}"
