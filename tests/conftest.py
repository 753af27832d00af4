"""What the tests share: tiny models made here, the embedded model, a Chromium.

Nothing heavy is imported before a fixture asks for it, so that a narrow run starts at once. In CI (the variable `CI`
is set) a skipped test is a failure: a check that silently did not happen proves nothing.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser
    from transformers import LlamaForCausalLM

TINY_VOCAB = 96
"""Ids of the tiny models; 0 is padding, 1 begins a text, 2 ends it."""

CHROMIUM_OPTIONS = (
    "--no-sandbox",  # for root in a container
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def tiny_target() -> LlamaForCausalLM:
    """A seeded random Llama: float32, CPU, two layers, context 512, answers that vary. Not to be changed by a test."""
    return _tiny_llama(noise=0.0)


@pytest.fixture(scope="session")
def tiny_draft() -> LlamaForCausalLM:
    """`tiny_target` with its weights disturbed: the likeliest token is the same two times in three."""
    return _tiny_llama(noise=0.01)


def _tiny_llama(noise: float) -> LlamaForCausalLM:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=TINY_VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,  # the usual 0.02 leaves all tokens about equally likely
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
        for weight in model.parameters():
            if noise and weight.ndim == 2:
                weight.add_(noise * torch.randn_like(weight))
    return model


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tiny tensors on one thread: several only wait for each other, for minutes where the machine is busy."""
    torch = sys.modules.get("torch")
    if torch is None or {"embedded", "browser"} & set(request.node.keywords):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def embedded_folder() -> Path:
    """The embedded model, fetched and converted first where it is missing; for tests marked `embedded`."""
    from specdemo.models.embedded import ensure_embedded

    return ensure_embedded()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A headless Chromium, the system's or Playwright's own; for tests marked `browser`."""
    from playwright.sync_api import Error, sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    system = next((path for name in names if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        try:
            chromium = playwright.chromium.launch(executable_path=system, args=list(CHROMIUM_OPTIONS))
        except Error as error:
            pytest.skip(f"No Chromium could be started; `make test` installs one: {error.message.splitlines()[0]}")
        yield chromium
        chromium.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; those in a browser last, since Playwright keeps an event loop running in this thread."""
    items.sort(key=lambda item: ("browser" in item.keywords, "embedded" in item.keywords))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, pytest.TestReport]:
    report: pytest.TestReport = yield
    return _no_skip_in_ci(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, pytest.CollectReport]:
    report: pytest.CollectReport = yield
    return _no_skip_in_ci(report)


def _no_skip_in_ci(report: Any) -> Any:
    expected = hasattr(report, "wasxfail")  # an expected failure is reported as a skip too, but it did run
    if os.environ.get("CI") and report.skipped and not expected:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"Nothing may be skipped in CI. {reason}"
    return report
