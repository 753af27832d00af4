"""What stands around the race, as Gradio's events: comparing all methods, keeping and sharing, a link's settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import gradio as gr

from .desk import Desk

SHARE_ACTS = ("save_run", "open_run", "copy_link")
COMPARE_ACTS = ("compare_all",)


class Handlers(Protocol):
    """What the tools need of the page."""

    desk: Desk

    def compare(self, visitor: str, values: Mapping[str, Any]) -> Iterator[str]: ...


def acts(names: tuple[str, ...]) -> str:
    """The script's way to set off a component's events: an object with a function for each."""
    return "{" + ", ".join(f"{name}: () => trigger('{name}')" for name in names) + "}"


def wire(
    page: Handlers,
    blocks: gr.Blocks,
    share: gr.HTML,
    compare: gr.HTML,
    stage: gr.HTML,
    fields: Mapping[str, Any],
    quiet: Mapping[str, Any],
    racing: Mapping[str, Any],
) -> None:
    """Connect the components. `fields`: the form's, the prompt first; `quiet`, `racing`: options of the events, the
    latter of those that hold the models."""

    def compare_all(request: gr.Request, *values: Any) -> Iterator[str]:
        yield from page.compare(request.session_hash or "", dict(zip(fields, values, strict=False)))

    def save_run(request: gr.Request, wanted: Any) -> str:
        return page.desk.save(request.session_hash or "", wanted)

    def open_run(request: gr.Request, text: Any) -> list[Any]:
        log, word = page.desk.open(request.session_hash or "", text)
        return [gr.skip() if log is None else log, word]

    def restore(request: gr.Request) -> list[Any]:
        values, word = page.desk.restored(dict(request.query_params))
        told = [gr.skip() if values is None else values[name] for name in fields]
        return [*told, gr.skip() if word is None else word]

    form = list(fields.values())
    compare.compare_all(compare_all, form, compare, preprocess=False, **racing, **quiet).then(
        None, js="() => specdemo.compared()", **quiet
    )
    # what the script sends stands in for the component's own value
    share.save_run(save_run, share, share, js="() => specdemo.wanted", preprocess=False, **quiet)
    share.open_run(open_run, share, [stage, share], js="() => specdemo.opened", preprocess=False, **quiet)
    share.copy_link(None, form, None, js="(...values) => specdemo.copyLink(...values)", **quiet)
    blocks.load(restore, None, [*form, share], **quiet)
