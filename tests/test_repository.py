"""The files around the code agree with each other: versions, the Space, the rule about skipped tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import specdemo
from specdemo.presets import EMBEDDED_MODEL

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def requirements(name: str) -> list[Requirement]:
    lines = (line.partition("#")[0].strip() for line in read(name).splitlines())
    return [Requirement(line) for line in lines if line]


def pins(python: str) -> dict[str, str]:
    """Package -> the version that constraints.txt holds for a Python; each has at most one."""
    found: dict[str, str] = {}
    for pin in requirements("constraints.txt"):
        if pin.marker is None or pin.marker.evaluate({"python_version": python}):
            assert pin.name not in found, f"{pin.name} is pinned twice for Python {python}"
            (specifier,) = pin.specifier
            assert specifier.operator == "==", f"{pin} is no pin"
            found[pin.name] = specifier.version
    return found


@pytest.mark.parametrize("python", PYTHONS)
def test_every_requirement_is_pinned_within_its_range(python: str) -> None:
    wanted = requirements("requirements.txt") + requirements("requirements-dev.txt")
    held = pins(python)
    assert {requirement.name for requirement in wanted} == set(held)
    assert [str(requirement) for requirement in wanted if held[requirement.name] not in requirement.specifier] == []


def test_the_tests_run_with_the_pinned_versions() -> None:
    held = pins(".".join(map(str, sys.version_info[:2])))
    installed = {name: version(name).partition("+")[0] for name in held}
    assert installed == held


def test_the_supported_pythons_are_the_same_everywhere() -> None:
    project = read("pyproject.toml")
    (declared,) = re.findall(r'^requires-python = "(.+)"$', project, re.MULTILINE)
    supported = [f"3.{minor}" for minor in range(8, 20) if f"3.{minor}" in SpecifierSet(declared)]
    assert supported == list(PYTHONS)
    assert re.findall(r"Python :: (3\.\d+)", project) == list(PYTHONS)
    assert "(3, 10) <= sys.version_info[:2] <= (3, 13)" in read("Makefile")


def test_the_version_is_told_once() -> None:
    assert f'\nversion = "{specdemo.__version__}"\n' in read("pyproject.toml")


def test_the_space_starts_the_tested_page() -> None:
    front_matter = read("README.md").split("---")[1]
    fields = dict(re.findall(r'^(\w+): "?([^"\n]*)"?$', front_matter, re.MULTILINE))
    assert fields["sdk"] == "gradio"
    assert fields["sdk_version"] == pins("3.11")["gradio"]
    assert fields["python_version"] in PYTHONS
    assert fields["license"] == "apache-2.0"
    assert (ROOT / fields["app_file"]).is_file()
    assert len(fields["short_description"]) <= 60  # the Hub's limit
    assert fields["suggested_hardware"] == "cpu-basic"
    assert f"  - {EMBEDDED_MODEL}\n" in front_matter


SKIPS = """
import pytest

def test_called():
    pytest.skip("no browser")

@pytest.mark.skip(reason="no browser")
def test_marked():
    pass

@pytest.fixture
def browser():
    pytest.skip("no browser")

def test_by_fixture(browser):
    pass

@pytest.mark.xfail(strict=True)
def test_expected_failure():
    raise ValueError

def test_good():
    pass
"""


@pytest.mark.parametrize(
    ("ci", "line"),
    [("true", "1 failed, 1 passed, 1 xfailed, 3 errors"), ("", "1 passed, 4 skipped, 1 xfailed")],
    ids=["in CI", "elsewhere"],
)
@pytest.mark.process
def test_a_skip_is_a_failure_in_ci_only(tmp_path: Path, ci: str, line: str) -> None:
    (tmp_path / "conftest.py").write_text(read("tests/conftest.py"), encoding="utf-8")
    (tmp_path / "test_skips.py").write_text(SKIPS, encoding="utf-8")
    (tmp_path / "test_whole_file.py").write_text("import pytest\npytest.importorskip('no_such_module')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--continue-on-collection-errors", "-p", "no:cacheprovider", "."],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env=os.environ | {"CI": ci, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert done.stdout.splitlines()[-1].startswith(line), done.stdout
    assert done.returncode == (1 if ci else 0)
