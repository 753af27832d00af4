"""What memory there is: of each card, of the system, and of the container that this process may not outgrow.

`this_machine` asks, `machine_of` takes it from words ("24GiB,24GiB"), so that a plan can be made for a machine that is
elsewhere. torch is imported only to ask a card.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ..errors import BadRequest
from .sizes import GIB

if TYPE_CHECKING:
    import torch

CUDA_CONTEXT = GIB // 2
"""What a process takes on a card before it has a single tensor: its context and the libraries' workspaces."""

_UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", re.IGNORECASE)
_INT8_CAPABILITY = (7, 5)


@dataclass(frozen=True, slots=True)
class Device:
    """Bytes free and in all. `half` is the 16-bit type that it computes in, or float32; `int8`, `nf4`: whether
    bitsandbytes has kernels for it."""

    name: str
    free: int
    total: int
    half: str = "bfloat16"
    int8: bool = True
    nf4: bool = True

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def margin(self) -> int:
        """Left free: allocators round up and fragment, and others use the device too."""
        return max(GIB // 4, self.total // 20)

    @property
    def room(self) -> int:
        return max(0, self.free - self.margin)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where models can go: the cards, or the processor where there is none. `host` is the system's memory where layers
    may wait that no card has room for; None where that is not known. `lean_int8`: the processor has the kernels."""

    devices: tuple[Device, ...]
    host: Device | None = None
    lean_int8: bool = False
    notes: tuple[str, ...] = field(default=())


def machine_of(memory: str) -> Machine:
    """The machine that `--memory` describes: cards by their memory, `cpu=SIZE` for the system's. Raises BadRequest."""
    cards: list[Device] = []
    host = None
    for part in filter(None, (part.strip() for part in memory.split(","))):
        name, _, size = part.rpartition("=")
        total = _bytes(size)
        if name == "cpu":
            host = Device("cpu", total, total, half="float16")
        elif name:
            raise BadRequest(f"{part!r} is no memory: give sizes such as 24GiB, and cpu=64GiB for the system's.")
        else:
            cards.append(Device(f"cuda:{len(cards)}", max(0, total - CUDA_CONTEXT), total))
    if not cards and host is None:
        raise BadRequest("--memory needs at least one size, such as 24GiB or 24GiB,24GiB.")
    note = "The cards are taken to compute in bfloat16 and to have kernels for 8 and 4 bits." if cards else ""
    return Machine(
        tuple(cards) or (host,) if host else tuple(cards), host, lean_int8=True, notes=(note,) if note else ()
    )


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    if match is None or (size := float(match[1]) * _UNITS[match[2].lower()]) < 1:
        raise BadRequest(f"{text!r} is no size of a memory: write it like 24GiB or 80GB.")
    return int(size)


def this_machine(chosen: torch.device, every_card: bool = False) -> Machine:
    """The memory that is free here and now on a device; `every_card`: on the other cards too."""
    import torch

    from ..models.linear import best_cpu_precision, precision_obstacle

    processor = torch.device("cpu")
    free, total = system_memory()
    host = Device("cpu", free, total, best_cpu_precision())
    lean_int8 = precision_obstacle("int8", processor) is None
    if chosen.type == "cuda":
        every = range(torch.cuda.device_count()) if every_card else [chosen.index or 0]
        return Machine(tuple(_card(index) for index in every), host, lean_int8)
    if chosen.type == "mps":
        limit = int(torch.mps.recommended_max_memory())
        room = min(limit - int(torch.mps.driver_allocated_memory()), free)  # the same memory as the system's
        return Machine((Device("mps", max(0, room), limit, "float16", int8=False, nf4=False),), None, lean_int8)
    return Machine((host,), None, lean_int8)


def _card(index: int) -> Device:
    import torch

    free, total = torch.cuda.mem_get_info(index)
    with torch.cuda.device(index):
        half = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    int8 = torch.cuda.get_device_capability(index) >= _INT8_CAPABILITY
    return Device(f"cuda:{index}", free, total, half, int8=int8)


def system_memory(
    control_groups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> tuple[int, int]:
    """Bytes that this process may still take, and may have in all: the system's, or its container's where that is
    less."""
    memory = psutil.virtual_memory()
    free, total = int(memory.available), int(memory.total)
    for limit, used in _limits(control_groups, own):
        total = min(total, limit)
        free = min(free, max(0, limit - used))
    return free, total


def _limits(root: Path, own: Path) -> list[tuple[int, int]]:
    """Limit and use of every control group that this process is in, versions 2 and 1, where there is a limit. Files
    that the kernel would drop when asked for memory are not use."""
    found = []
    for folder in _groups(root, own):
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            try:
                limit = int((folder / names[0]).read_text())
                used = int((folder / names[1]).read_text())
                statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue  # "max" is no number: no limit
            found.append((limit, max(0, used - int(statistics.get(names[2], 0)))))
    return found


def _groups(root: Path, own: Path) -> list[Path]:
    """The folders of this process's groups, innermost first, up to the root."""
    folders = []
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _number, controllers, path = line.split(":", 2)
        base = root / "memory" if "memory" in controllers.split(",") else root
        if controllers and base == root:
            continue
        folder = base / path.strip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
    return folders
