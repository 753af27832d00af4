"""From names to a plan: `--pair`, `--target` and `--draft` become two shapes, and "auto" the best pair that fits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from huggingface_hub import get_token

from ..errors import BadRequest
from ..models.names import AUTO, EMBEDDED, NONE
from ..presets import PRESETS, Preset, find
from .choose import Plan, Wishes, choose, choose_whole, gib
from .devices import Machine
from .shape import ModelShape
from .sizes import GIB
from .sources import shape_of, shipped_draft_shape
from .tokenizers import tokenizers_note

PROCESSOR_TARGET_BYTES = 4 * GIB
"""The largest target that "auto" takes for a processor, which reads some 20 GB a second: five tokens a second."""


def named(pair: str | None, target: str, draft: str) -> tuple[str, str]:
    """Names of target and draft as the options say. Raises BadRequest where they say two things, or name no pair."""
    if pair is None:
        return target, draft
    if (target, draft) != (EMBEDDED, AUTO):
        raise BadRequest("--pair names both models: leave out --target and --draft, or --pair.")
    preset = find(pair)
    return preset.target, preset.draft


def shapes_of(target: str, draft: str, ask_hub: bool = True) -> tuple[ModelShape, ModelShape | None]:
    """The shapes behind two names, as `load_pair` understands them. Raises ModelUnavailable."""
    target_shape = shape_of(target, ask_hub)
    if draft == NONE or (draft == AUTO and target != EMBEDDED):
        return target_shape, None
    return target_shape, shipped_draft_shape() if draft == AUTO else shape_of(draft, ask_hub)


def plan_pair(target: str, draft: str, machine: Machine, wishes: Wishes, ask_hub: bool = True) -> Plan:
    """The plan for two names; where nothing fits, its reason names the pair that would. Raises ModelUnavailable where
    the tokenizers are here and differ."""
    target_shape, draft_shape = shapes_of(target, draft, ask_hub)
    plan = choose(target_shape, draft_shape, machine, wishes)
    of_two = draft_shape is not None and not draft_shape.shares_embedding  # a distilled draft has its target's
    note = tokenizers_note(target, draft) if of_two else None
    if note and plan.draft:
        plan = replace(plan, notes=(*plan.notes, note))
    if plan.fits:
        return plan
    for preset, other in _fitting(machine, wishes):
        advice = f" The pair {preset.name} would fit: it needs {gib(other.bytes.total)}."
        return replace(plan, reason=plan.reason + advice)
    return replace(plan, reason=f"{plan.reason} None of the named pairs fits: free some memory.")


def best_pair(machine: Machine, wishes: Wishes) -> tuple[Preset, Plan]:
    """The first of the named pairs that fits with its draft model and that can be fetched: gated ones only where there
    is a token. Raises BadRequest where there is none."""
    token = bool(get_token() or os.environ.get("HF_TOKEN"))
    for preset, plan in _fitting(machine, wishes):
        if token or not preset.gated:
            return preset, plan
    raise BadRequest("None of the named pairs fits this machine: free some memory.")


def _fitting(machine: Machine, wishes: Wishes) -> Iterator[tuple[Preset, Plan]]:
    for preset in PRESETS.values():
        plan = choose_whole(*shapes_of(preset.target, preset.draft), machine, wishes)
        slow = machine.devices[0].kind == "cpu"
        if plan and not (slow and plan.bytes.target_weights > PROCESSOR_TARGET_BYTES):
            yield preset, plan
