"""The entry point as a process: up before any model, down at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

APP = Path(__file__).parents[1] / "app.py"


def test_page_is_up_without_a_model_and_stops_on_ctrl_c(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = subprocess.Popen(
        [sys.executable, str(APP), "--port", str(port), "--target", str(tmp_path / "no-model-here")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
    )
    try:
        assert app.stdout is not None
        line = app.stdout.readline()
        assert f"http://127.0.0.1:{port}/" in line
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/config") as answer:
            config = json.load(answer)
        assert {"head", "stage", "race-button"} <= {c["props"].get("elem_id") for c in config["components"]}
        pressed = time.monotonic()
        app.send_signal(signal.SIGINT)
        assert app.wait(timeout=10) == 0
        assert time.monotonic() - pressed < 3  # a tenth of a second where nothing else runs
    finally:
        app.kill()
        app.communicate()


def test_a_page_that_cannot_be_shared_says_so_and_goes_on_behind_its_login(tmp_path: Path) -> None:
    """Without a way to Gradio's tunnel: every address but this machine's is behind a proxy that is not there."""
    logins = tmp_path / "logins"
    logins.write_text("ada:open-sesame\n", encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(APP), "--port", str(port), "--share", "--auth", str(logins)]
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9") | {
        "NO_PROXY": "127.0.0.1"
    }
    app = subprocess.Popen(
        [*command, "--target", str(tmp_path / "no-model-here")],
        stdout=subprocess.PIPE,
        env={**os.environ, **nowhere, **{name.lower(): value for name, value in nowhere.items()}},
        text=True,
    )
    try:
        assert app.stdout is not None
        said = []
        while not said or not said[-1].startswith("No public link could be made"):
            said.append(app.stdout.readline())
            assert said[-1], said
        url = f"http://127.0.0.1:{port}"
        assert any(f"specdemo is at {url}/" in line for line in said)
        assert not any("*" in line for line in said)  # Gradio's own words
        assert status_of(f"{url}/config") == 401
        assert status_of(f"{url}/healthz") in (200, 503)
        assert status_of(f"{url}/gradio_api/file=/etc/passwd") == 404  # it is a public page, link or not
        form = {"username": "ada", "password": "open-sesame"}
        assert status_of(f"{url}/login", urllib.parse.urlencode(form).encode()) == 200
        assert status_of(f"{url}/login", urllib.parse.urlencode({**form, "password": "x"}).encode()) == 400
        asked = time.monotonic()
        app.send_signal(signal.SIGTERM)
        assert app.wait(timeout=10) == 0
        assert time.monotonic() - asked < 3
    finally:
        app.kill()
        app.communicate()


def status_of(url: str, body: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(url, body) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_a_password_in_the_command_line_is_refused_and_not_repeated() -> None:
    result = subprocess.run(
        [sys.executable, str(APP), "--auth", "ada:open-sesame"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert "env:NAME" in result.stderr
    assert "sesame" not in result.stderr


def test_a_bad_argument_is_one_line_and_exit_code_2() -> None:
    result = subprocess.run([sys.executable, str(APP), "--bogus"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "--bogus" in result.stderr
