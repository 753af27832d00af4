"""Which models run, in which memory, and how a visitor at this machine puts others in their place.

The panel's state is one small JSON text: how the models are, the plan as bars, what to load instead where memory ran
out. Switching changes the page for everyone, so only who sits at the machine may do it; what is asked for is checked
all the same.
"""

from __future__ import annotations

import ipaddress
import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias
from urllib.parse import urlsplit

from ..errors import BadRequest, SpecdemoError
from ..models.names import AUTO, NONE
from ..plan.choose import PRECISIONS, Plan, bars
from ..presets import PRESETS
from .assets import escaped, strings

if TYPE_CHECKING:
    from ..models.loading import Pair
    from ..plan.load import Planned

OTHER = "other"
_LONGEST_REQUEST, _LONGEST_NAME = 3000, 1000
_FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")
_log = logging.getLogger(__name__)

Load: TypeAlias = "Callable[[Callable[[str, float], None]], Pair]"


class Switcher(Protocol):
    """What the panel needs of the arena."""

    @property
    def pair(self) -> Pair | None: ...

    @property
    def status(self) -> Any: ...

    @property
    def ran_out(self) -> bool: ...

    def start_switching(self, load: Load) -> object: ...

    def cancel_loading(self) -> None: ...


def is_local(client: str, headers: Mapping[str, str]) -> bool:
    """Whether a request comes straight from this machine: by its peer, by the name it asked for (a public tunnel ends
    at this machine too, and so does a name that was bent to our address), by the page it was made on, and through no
    proxy."""
    if any(name in headers for name in _FORWARDED):
        return False
    asked_for = f"//{headers.get('host', '')}"
    addresses = (f"//[{client}]" if ":" in client else f"//{client}", asked_for, headers.get("origin", asked_for))
    return all(map(_is_loopback, addresses))


def _is_loopback(address: str) -> bool:
    try:
        name = urlsplit(address).hostname
        return name == "localhost" or ipaddress.ip_address(name or "").is_loopback
    except ValueError:
        return False


class Models:
    """The handlers, free of Gradio's components. Each answers with the panel's new state. `device` is where other
    models are put; `closed`: nobody may switch, not even who seems to be local, since a proxy may stand before it."""

    def __init__(self, arena: Switcher, device: str = AUTO, closed: bool = False) -> None:
        self._arena = arena
        self._device = device
        self._closed = closed

    def first(self, local: bool) -> str:
        """The state, and what can be chosen."""
        pairs = [[preset.name, preset.target, preset.draft, preset.gated] for preset in PRESETS.values()]
        return self.state(local, choices={"pairs": pairs, "precisions": list(PRECISIONS)})

    def state(self, local: bool, **more: Any) -> str:
        """How the models are, as JSON. `more`: fields besides."""
        status, pair = self._arena.status, self._arena.pair
        shown: dict[str, Any] = {
            "local": local and not self._closed,
            "state": status.state,
            "message": status.message,
            "progress": round(status.progress, 3),
            **more,
        }
        if pair is not None:
            shown["now"] = _what_runs(pair)
            if pair.plan is not None:
                shown["plan"] = _drawn(pair.plan)
            if self._arena.ran_out:
                shown["short"] = {"smaller": pair.smaller.plan.described if pair.smaller else None}
        return escaped(shown)

    def switch(self, local: bool, wanted: object) -> str:
        """Load what `wanted`, the panel's JSON, asks for; the old pair goes before."""
        return self._when(local, lambda: self._start(_planned_load(self._asked(wanted))))

    def smaller(self, local: bool) -> str:
        """Load the plan that is offered where memory ran out."""
        return self._when(local, self._start_smaller)

    def cancel(self, local: bool) -> str:
        """Give up the loading in progress."""
        return self._when(local, self._arena.cancel_loading)

    def preview(self, local: bool, wanted: object) -> str:
        """The plan of what `wanted` asks for, before anything is loaded or released."""
        found: dict[str, Any] = {}

        def look() -> None:
            plan = plan_here(**self._asked(wanted), freed=self._freed()).plan
            found["preview"] = {**_drawn(plan), "fits": plan.fits}

        return self._when(local, look, found)

    def _when(self, local: bool, act: Callable[[], object], more: Mapping[str, Any] | None = None) -> str:
        """`act`, if the visitor may; whatever speaks against it becomes a note."""
        try:
            if self._closed or not local:
                raise BadRequest(strings()["models_elsewhere"])
            act()
        except SpecdemoError as error:
            return self.state(local, note=str(error))
        except Exception as error:
            _log.exception("the models cannot be switched")
            return self.state(local, note=strings()["error_models"].format(fault=type(error).__name__))
        return self.state(local, **(more or {}))

    def _asked(self, wanted: object) -> dict[str, Any]:
        return {**asked(wanted), "device": self._device}

    def _start(self, load: Load) -> None:
        if self._arena.status.state == "loading":
            raise BadRequest(strings()["error_models_loading"])
        self._arena.start_switching(load)

    def _start_smaller(self) -> None:
        pair = self._arena.pair
        if pair is None or pair.smaller is None:
            raise BadRequest(strings()["error_models_smallest"])
        self._start(pair.smaller.load)

    def _freed(self) -> dict[str, int]:
        """Bytes by device that the loaded weights will give back."""
        pair = self._arena.pair
        if pair is None or pair.plan is None:
            return {}
        return {name: load.target_weights + load.draft_weights for name, load in pair.plan.loads.items()}


def load_fitting(**wanted: Any) -> Pair:
    from ..plan import load  # here, since a page whose lanes are servers' has no need of torch

    return load.load_fitting(**wanted)


def plan_here(**wanted: Any) -> Planned:
    from ..plan import load

    return load.plan_here(**wanted)


def _planned_load(wanted: Mapping[str, Any]) -> Load:
    return lambda progress: load_fitting(**wanted, progress=progress)


def asked(wanted: object) -> dict[str, Any]:
    """The panel's JSON as arguments of `load_fitting`. pair: a preset's name, "auto" or "other", whose name is then
    `target`; drafter: "own", "none" or "other", whose name is then `draft`; precision: a key of PRECISIONS. Raises
    BadRequest."""
    try:
        if not isinstance(wanted, str) or len(wanted) > _LONGEST_REQUEST:
            raise ValueError
        form = json.loads(wanted)
        pair, drafter, precision = (form[name] for name in ("pair", "drafter", "precision"))
        dtype, quantize = PRECISIONS[precision]
        if pair not in (AUTO, OTHER, *PRESETS) or drafter not in ("own", NONE, OTHER):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise BadRequest(strings()["error_models_request"]) from None
    how = {"dtype": dtype, "quantize": quantize}
    if pair == AUTO:
        if drafter != "own":
            raise BadRequest(strings()["error_models_auto"])
        return {"pair": AUTO, **how}
    target = _name(form, "target") if pair == OTHER else PRESETS[pair].target
    if drafter == "own":
        draft = AUTO if pair == OTHER else PRESETS[pair].draft
    else:
        draft = NONE if drafter == NONE else _name(form, "draft")
    return {"target": target, "draft": draft, **how}


def _name(form: Mapping[str, Any], field: str) -> str:
    name = form.get(field)
    if not isinstance(name, str) or not name.strip() or len(name) > _LONGEST_NAME or not name.isprintable():
        raise BadRequest(strings()[f"error_models_{field}"])
    return name.strip()


def _what_runs(pair: Pair) -> dict[str, Any]:
    target, draft = pair.target, pair.draft
    return {
        "target": target.name,
        "precision": target.precision,
        "path": target.forward_path,
        "draft": draft and {"name": draft.name, "precision": draft.precision, "path": draft.forward_path},
        "device": str(target.device),
    }


def _drawn(plan: Plan) -> dict[str, Any]:
    return {
        "bars": bars(plan),
        "total": plan.bytes.total,
        "context": plan.context,
        "target": plan.target,
        "draft": plan.draft,
        "precisions": [kept.precision for kept in (plan.target_kept, plan.draft_kept) if kept],
        "reason": plan.reason,
        "notes": list(plan.notes),
    }
