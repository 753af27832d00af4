"""The Dockerfile against the project: no container is built here, so every path, user, port and command is compared."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_repository import PYTHONS, pins, read

import app
from specdemo.models.cache_folder import cache_folder
from specdemo.ui.gate import HEALTH
from specdemo.ui.serving import is_public

ROOT = Path(__file__).parents[1]
Step = tuple[str, str]


@pytest.fixture(scope="module")
def steps() -> list[Step]:
    """The instructions in order, continued lines joined: (keyword, the rest)."""
    lines = [line for line in read("Dockerfile").splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1].strip()) for line in joined.splitlines()]


def settings(steps: list[Step], keyword: str) -> dict[str, str]:
    """NAME=value of every ENV or ARG."""
    found: dict[str, str] = {}
    for word, rest in steps:
        if word == keyword:
            found.update((name, value.strip('"')) for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', rest))
    return found


def run_of(steps: list[Step], part: str) -> int:
    """Where the command that contains `part` runs."""
    (index,) = [index for index, (keyword, rest) in enumerate(steps) if keyword == "RUN" and part in rest]
    return index


def test_it_copies_what_is_there_and_what_it_is_sent(steps: list[Step]) -> None:
    sent = {line.removeprefix("!") for line in read(".dockerignore").splitlines() if line.startswith("!")}
    copied: set[str] = set()
    for keyword, rest in steps:
        if keyword == "COPY":
            *sources, _ = [part for part in rest.split() if not part.startswith("--")]
            copied |= set(sources)
    assert copied == sent
    assert [name for name in sorted(copied) if not (ROOT / name).exists()] == []
    assert {"app.py", "specdemo", "traces", "requirements.txt", "constraints.txt"} <= copied


def test_it_runs_as_a_plain_user(steps: list[Step]) -> None:
    """A Docker Space runs the image as user 1000, whatever it says."""
    keywords = [keyword for keyword, _ in steps]
    assert ("USER", "1000") in steps
    as_root = steps[: keywords.index("USER")]
    assert [rest for keyword, rest in as_root if keyword in ("RUN", "COPY")] == [
        "useradd --create-home --uid 1000 user"
    ]
    assert all("--chown=1000" in rest for keyword, rest in steps if keyword == "COPY")


def test_it_listens_where_it_is_asked_and_checked(steps: list[Step]) -> None:
    last = dict(steps)
    command, check = json.loads(last["CMD"]), json.loads(last["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["python", "app.py"]
    options = app._parse(command[2:])
    assert (options.host, options.port) == ("0.0.0.0", 7860)
    assert is_public(options)
    assert last["EXPOSE"] == str(options.port)
    assert check[:2] == ["python", "-c"]
    compile(check[2], "HEALTHCHECK", "exec")
    assert f"'http://127.0.0.1:{options.port}{HEALTH}'" in check[2]


def test_every_module_that_it_runs_exists(steps: list[Step]) -> None:
    modules = [name for keyword, rest in steps if keyword == "RUN" for name in re.findall(r"python -m ([\w.]+)", rest)]
    assert "specdemo.models.embedded" in modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []


def test_the_python_is_the_space_s_and_the_torch_the_tested_one(steps: list[Step]) -> None:
    (image,) = [rest for keyword, rest in steps if keyword == "FROM"]
    python = image.removeprefix("python:").removesuffix("-slim")
    assert python in PYTHONS
    assert f'python_version: "{python}"' in read("README.md")
    arguments = settings(steps, "ARG")
    assert arguments["TORCH"] == f"torch=={pins(python)['torch']}"
    assert '"${TORCH}"' in steps[run_of(steps, "python -m venv")][1]
    assert "-c constraints.txt" in steps[run_of(steps, "-r requirements.txt")][1]


def test_the_embedded_model_is_baked_in_where_the_program_looks_for_it(
    steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = settings(steps, "ENV")
    monkeypatch.setenv("SPECDEMO_CACHE", environment["SPECDEMO_CACHE"])
    assert cache_folder() == Path(environment["SPECDEMO_CACHE"])
    baked = run_of(steps, "specdemo.models.embedded")
    assert settings(steps, "ARG")["EMBEDDED"] == "yes"
    assert 'if [ "${EMBEDDED}" = "yes" ]' in steps[baked][1]
    keywords = [keyword for keyword, _ in steps]
    copied = next(index for index, (keyword, rest) in enumerate(steps) if keyword == "COPY" and "specdemo" in rest)
    assert keywords.index("USER") < keywords.index("ENV") < copied < baked


def test_the_volume_keeps_the_hub_s_models_and_hides_nothing_baked_in(steps: list[Step]) -> None:
    volume, environment = dict(steps)["VOLUME"], settings(steps, "ENV")
    assert environment["HF_HOME"].startswith(f"{volume}/")
    assert not environment["SPECDEMO_CACHE"].startswith(volume)
    assert volume in steps[run_of(steps, "mkdir ")][1]  # made by the user, who then owns what is mounted there


def test_the_linter_has_nothing_to_say() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "hadolint"), "--no-color", str(ROOT / "Dockerfile")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
