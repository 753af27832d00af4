"""What a measurement was made on: enough to compare and repeat it, and nothing that names a person or a machine."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers

from . import __version__

FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "bf16",
    "i8mm",
)
"""Processor features that decide which kernels run, by the names of /proc/cpuinfo."""


def describe(device: torch.device) -> dict[str, Any]:
    """Versions, processor, device, date and revision, for the head of a report."""
    model, flags = _processor()
    return {
        "specdemo": __version__,
        "revision": _revision(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "processor": model,
        "processor_features": [name for name in FEATURES if name in flags],
        "cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        "device": device.type,
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else model,
    }


def _processor() -> tuple[str, frozenset[str]]:
    """Model name and feature flags; /proc/cpuinfo where there is one (Linux), else what Python knows."""
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    except OSError:
        return platform.processor() or platform.machine(), frozenset()
    name = fields.get("model name") or platform.processor() or platform.machine()
    return name, frozenset((fields.get("flags") or fields.get("features") or "").split())


def _usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _revision() -> str | None:
    """Commit of the checkout that this package runs from, marked where files differ from it; None outside of one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit} with local changes" if changed else commit


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()
