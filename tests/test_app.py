"""The entry point as a process: up before any model, down at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

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


def test_a_bad_argument_is_one_line_and_exit_code_2() -> None:
    result = subprocess.run([sys.executable, str(APP), "--bogus"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert "--bogus" in result.stderr
