"""Imports run towards events, never back: the rules of docs/architecture.md, read from the source.

A rule that never fires proves nothing, so each is also tried on a package made here that breaks it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

WITHOUT_TORCH = ("events", "errors", "metrics", "trace", "ui.view", "served.arena")
"""Modules that a page without models, a test or a reader of traces loads alone."""

PURE = ("engines", "drafters", "acceptance", "sampling", "events", "metrics")
"""Never print, sleep, log or look at the environment."""


def test_the_package_keeps_the_rules() -> None:
    assert violations(ROOT / "specdemo") == []


def test_only_the_page_is_made_of_gradio() -> None:
    """A test of the rule's other half: were nothing of it found, the reader of imports would be broken."""
    assert "gradio" in reached(imports_of(ROOT / "specdemo"), "ui.page")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({"cli.py": "import gradio"}, "cli imports gradio", id="gradio outside the page"),
        pytest.param(
            {"arena.py": "def f():\n    from gradio import Blocks"}, "arena imports gradio", id="gradio in a function"
        ),
        pytest.param({"arena.py": "from .ui import page", "ui/page.py": ""}, "arena imports ui.page", id="ui below"),
        pytest.param({"metrics.py": "import torch.nn"}, "metrics reaches torch", id="torch in metrics"),
        pytest.param(
            {"ui/view.py": "from ..sampling import draw", "sampling.py": "from torch import Tensor"},
            "ui.view reaches torch by way of sampling",
            id="torch at second hand",
        ),
        pytest.param(
            {"trace.py": "from pkg import sampling", "sampling.py": "import torch"},
            "trace reaches torch by way of sampling",
            id="torch by the package's name",
        ),
        pytest.param({"events.py": "import numpy"}, "events imports numpy", id="events beyond the standard library"),
        pytest.param(
            {"engines/standard.py": "from ..arena import race", "arena.py": ""}, "engines.standard reaches arena"
        ),
        pytest.param(
            {"engines/standard.py": "from .. import metrics", "metrics.py": ""}, "engines.standard reaches metrics"
        ),
        pytest.param({"drafters/ssd.py": "from ..cli import main", "cli.py": ""}, "drafters.ssd reaches cli"),
        pytest.param({"drafters/ssd.py": "from ..ui import view", "ui/view.py": ""}, "drafters.ssd reaches ui.view"),
        pytest.param(
            {"acceptance.py": "from .models.base import CachedLM", "models/base.py": ""},
            "acceptance reaches models.base",
        ),
        pytest.param({"acceptance.py": "import transformers"}, "acceptance reaches transformers"),
        pytest.param({"text.py": "from .trace import f", "trace.py": "from .text import g"}, "text imports itself"),
        pytest.param({"engines/standard.py": "print('x')"}, "engines.standard calls print"),
        pytest.param({"engines/standard.py": "import logging"}, "engines.standard imports logging"),
        pytest.param({"drafters/ssd.py": "import os\nos.environ['X']"}, "drafters.ssd imports os"),
        pytest.param({"drafters/ssd.py": "import time\ntime.sleep(1)"}, "drafters.ssd calls sleep"),
    ],
)
def test_a_broken_rule_is_seen(tmp_path: Path, files: dict[str, str], expected: str) -> None:
    for name in ("", "engines/", "drafters/", "models/", "ui/"):
        files = {f"{name}__init__.py": "", **files}
    write_package(tmp_path / "pkg", files)
    found = violations(tmp_path / "pkg")
    assert any(line.startswith(expected) for line in found), found


def test_allowed_imports_are_left_alone(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from .engines.standard import standard",
        "events.py": "from dataclasses import dataclass",
        "metrics.py": "from .events import f",
        "sampling.py": "import torch",
        "engines/__init__.py": "",
        "engines/standard.py": "import time\nfrom ..events import f\nfrom .. import sampling\ntime.perf_counter()",
        "ui/__init__.py": "",
        "ui/view.py": "from ..metrics import fold",
        "ui/page.py": "import gradio\nimport torch\nfrom . import view",
    }
    write_package(tmp_path / "pkg", files)
    assert violations(tmp_path / "pkg") == []


def write_package(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(source, encoding="utf-8")


def violations(package: Path) -> list[str]:
    """Every broken rule of the package in a folder, one line each; module names are relative to the package."""
    imports = imports_of(package)
    return [line for module in imports for line in violations_of(package, module, imports)]


def violations_of(package: Path, module: str, imports: dict[str, set[str]]) -> Iterator[str]:
    part = module.split(".")[0]
    not_direct: list[str] = []
    not_reached: list[str] = []
    if part != "ui":
        not_direct += ["gradio"]
        not_direct += ["ui"] if part not in ("cli", "__main__") else []
    if part != "__main__":
        not_direct += ["cli"]
    if module in WITHOUT_TORCH:
        not_reached += ["torch", "transformers"]
    if part in ("engines", "drafters"):
        not_reached += ["arena", "ui", "metrics", "cli"]
    if module == "acceptance":
        not_reached += ["models", "transformers"]
    if part in PURE:
        not_direct += ["logging", "os"]
        for name in sorted(calls(package, module) & {"print", "sleep", "input"}):
            yield f"{module} calls {name}"

    for name in sorted(imports[module]):
        beyond = module in ("events", "errors") and name.split(".")[0] not in sys.stdlib_module_names
        if beyond or any(within(name, forbidden) for forbidden in not_direct):
            yield f"{module} imports {name}"
    for name, path in reached(imports, module).items():
        if name == module:
            yield f"{module} imports itself by way of {', '.join(path)}"
        if any(within(name, forbidden) for forbidden in not_reached):
            yield f"{module} reaches {name}" + (f" by way of {', '.join(path)}" if path else "")


def within(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(wanted + ".")


def reached(imports: dict[str, set[str]], start: str) -> dict[str, list[str]]:
    """All that `start` imports, directly or through modules of the package: name -> the modules in between.

    Packages' own __init__ files, which run first whatever is imported, are no edge of a module's design.
    """
    found: dict[str, list[str]] = {}
    waiting = [(name, list[str]()) for name in sorted(imports[start])]
    while waiting:
        name, path = waiting.pop(0)
        if name not in found:
            found[name] = path
            waiting += [(next_name, [*path, name]) for next_name in sorted(imports.get(name, ()))]
    return found


def imports_of(package: Path) -> dict[str, set[str]]:
    """Module -> the names it imports, wherever in its file; those of the package relative to it, others in full."""
    files = {module_name(package, file): file for file in sorted(package.rglob("*.py"))}
    return {module: read_imports(package.name, module, file, set(files)) for module, file in files.items()}


def module_name(package: Path, file: Path) -> str:
    parts = list(file.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_imports(package: str, module: str, file: Path, modules: set[str]) -> set[str]:
    found = set()
    here = module.split(".") if file.stem == "__init__" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([package, *filter(None, here[: len(here) - node.level + 1])]) if node.level else ""
            base = ".".join(filter(None, [base, node.module]))
            names = [(base, alias.name) for alias in node.names]
        else:
            continue
        for base, name in names:
            if not within(base, package):
                found.add(base)
                continue
            inside = base.removeprefix(package).removeprefix(".")
            member = ".".join(filter(None, [inside, name]))
            found.add(member if member in modules else inside)
    return found - {""}


def calls(package: Path, module: str) -> set[str]:
    """Names called in a module, `f` of `f()` and of `x.f()` alike."""
    file = package.joinpath(*module.split("."))
    file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
    nodes = [node.func for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    named = {node.id for node in nodes if isinstance(node, ast.Name)}
    return named | {node.attr for node in nodes if isinstance(node, ast.Attribute)}
