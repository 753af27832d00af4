"""Pictures of the page for the documentation: `python docs/screenshot.py URL` with the page running at URL.

Runs one race in each look and writes to `docs/images`: the page after the race (`page-light.png`, `page-dark.png`,
`page-phone.png`), a token that was asked why (`why-light.png`, `why-dark.png`) and what the race teaches
(`lessons-light.png`, `lessons-dark.png`).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from playwright.sync_api import Page, ViewportSize, sync_playwright

IMAGES = Path(__file__).parent / "images"
PROMPT = """Correct the spelling mistakes in this paragraph and return the whole paragraph.

The comitee will meat on Thursday to discus the new libary rules. All membres are wellcome, and tea will be servd \
at the end of the meeting."""

LOOKS: tuple[tuple[str, ViewportSize], ...] = (
    ("light", {"width": 1440, "height": 1060}),
    ("dark", {"width": 1440, "height": 1060}),
    ("phone", {"width": 390, "height": 844}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--prompt", default=PROMPT)
    options = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for look, viewport in LOOKS:
            page = browser.new_page(viewport=viewport, color_scheme="dark" if look == "dark" else "light")
            page.set_default_timeout(300_000)
            page.goto(options.url)
            race(page, options.prompt)
            page.screenshot(path=IMAGES / f"page-{look}.png")
            if look != "phone":
                look_closer(page, look)
            page.close()
        browser.close()


def race(page: Page, prompt: str) -> None:
    page.wait_for_selector('.sd-status[data-state="ready"]')
    page.locator("#ask textarea").fill(prompt)
    page.locator("#race-button").click()
    page.wait_for_function("document.body.dataset.race === 'running'")
    page.wait_for_function("document.body.dataset.race === 'idle'")
    page.locator("#ask textarea").blur()
    if page.viewport_size and page.viewport_size["width"] > 760:
        page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(1200)


def look_closer(page: Page, look: str) -> None:
    """In the middle of the race: a refused token, and the parts under the lanes."""
    page.locator(".sd-scrub").fill("400")
    page.locator('[data-lane="speculative"] .sd-rejected').last.click()
    page.wait_for_timeout(300)
    page.screenshot(path=IMAGES / f"why-{look}.png")
    page.keyboard.press("Escape")
    page.locator(".sd-after").screenshot(path=IMAGES / f"lessons-{look}.png")


if __name__ == "__main__":
    main()
