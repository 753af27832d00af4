"""The public page in a browser: under its own security policy everything works, and elsewhere it is not framed."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from fake_lanes import FakeArena

from specdemo.ui.page import build, launch_options

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [
    pytest.mark.browser,
    # Gradio's server counts its calls with pandas, in ways that pandas is about to drop
    pytest.mark.filterwarnings("ignore:.*(no_silent_downcasting|copy keyword is deprecated):DeprecationWarning"),
]

PROMPT = "one two three four five six seven eight nine ten"


@pytest.fixture(scope="module")
def url(browser: Browser) -> Iterator[str]:
    """Playwright's event loop is the one that Gradio finds: it must start first."""
    blocks = build(FakeArena(), public=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    _, address, _ = blocks.launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        prevent_thread_lock=True,
        **launch_options(lambda: "ready", public=True),
    )
    yield address
    blocks.close(verbose=False)


@pytest.fixture(scope="module")
def frame(url: str) -> Iterator[str]:
    """A page of another origin that frames ours."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = f'<!doctype html><title>elsewhere</title><iframe src="{url}"></iframe>'.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://localhost:{server.server_address[1]}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_races_comparisons_and_files_work_under_the_policy(url: str, browser: Browser) -> None:
    faults: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(60_000)
    tab = context.new_page()
    tab.on("pageerror", lambda error: faults.append(str(error)))
    tab.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    tab.on("response", lambda answer: faults.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    tab.goto(url)
    tab.wait_for_selector(".sd-status[data-state]")
    tab.locator("#ask textarea").fill(PROMPT)
    tab.locator("#race-button").click()
    tab.wait_for_function("document.body.dataset.race === 'idle'")
    spans = tab.locator('[data-lane="speculative"] .sd-token:not([aria-hidden])').all_text_contents()
    assert "".join(spans) == PROMPT
    with tab.expect_download() as download:
        tab.locator("[data-share='lines']").click()
    assert json.loads(download.value.path().read_text(encoding="utf-8").splitlines()[0])["type"]
    context.close()
    assert faults == []


def test_the_page_is_not_framed_elsewhere(url: str, frame: str, browser: Browser) -> None:
    context = browser.new_context()
    tab = context.new_page()
    said: list[str] = []
    tab.on("console", lambda message: said.append(message.text))
    tab.goto(frame)
    tab.wait_for_timeout(1500)
    assert any("frame-ancestors" in text for text in said), said
    assert tab.frames[-1].locator("#race-button").count() == 0
    context.close()
