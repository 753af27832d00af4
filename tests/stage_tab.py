"""The race's stage alone in a Chromium tab: what the page's script makes of a log, without a server.

A plugin: test modules that draw races name it in `pytest_plugins` and get the fixture `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from playwright.sync_api import Page as Tab

OpenStage: TypeAlias = "Callable[..., Tab]"


@pytest.fixture(scope="module")
def stage(browser: Browser) -> Iterator[OpenStage]:
    """Open a tab in which a finished race stands. A fault in its script fails the module."""
    from specdemo.ui.assets import KEPT_SCRIPTS, script, style

    faults: list[str] = []
    contexts = []

    def open_stage(log: str, width: int = 1280, height: int = 900, direction: str = "ltr", **look: Any) -> Tab:
        context = browser.new_context(viewport={"width": width, "height": height}, **look)
        context.set_default_timeout(40_000)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.on("request", lambda request: faults.append(request.url))
        tab.set_content(
            f'<!doctype html><html lang="en" dir="{direction}"><meta charset="utf-8"><style>{style()}</style>'
            f'<body class="gradio-container"><div class="main app"><div id="stage"></div></div>'
            f"<script>{script(KEPT_SCRIPTS)}</script></body></html>"
        )
        tab.evaluate(
            "log => specdemo.mountStage(document.querySelector('#stage'), () => log, () => {}, "
            "() => { window.asked = specdemo.picked; })",
            log,
        )
        return tab

    yield open_stage
    for context in contexts:
        context.close()
    assert faults == []
