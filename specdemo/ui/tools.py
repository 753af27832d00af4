"""What stands around the race, as Gradio's events: comparing all methods, keeping and sharing, a link's settings, and
putting other models in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import gradio as gr

from .desk import Desk
from .gate import address_of
from .models import Models, is_local

SHARE_ACTS = ("save_run", "open_run", "copy_link")
COMPARE_ACTS = ("compare_all",)
MODEL_ACTS = ("preview_models", "switch_models", "load_smaller", "cancel_loading")


class Handlers(Protocol):
    """What the tools need of the page."""

    desk: Desk

    def compare(self, visitor: str, values: Mapping[str, Any], address: str = "") -> Iterator[str]: ...


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
        asked = dict(zip(fields, values, strict=False))
        yield from page.compare(request.session_hash or "", asked, address_of(request))

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


def wire_models(
    models: Models,
    blocks: gr.Blocks,
    panel: gr.HTML,
    status: gr.HTML,
    timer: gr.Timer,
    tell: Callable[[], str],
    raced: Any,
    quiet: Mapping[str, Any],
    public: bool,
) -> None:
    """Connect the panel of the models. `status`: the page's status line, and `tell` its value; `timer` runs while
    models load; `raced`: what follows a race, in which memory may have run out. public: nobody's request is taken for
    one from this machine."""
    at_once = {"queue": False, "preprocess": False, **quiet}
    wanted = {"inputs": panel, "js": "() => specdemo.wantedModels"}

    def answer(act: Callable[..., str]) -> Callable[..., list[Any]]:
        def answered(request: gr.Request, *asked: Any) -> list[Any]:
            return told(act(not public and _local(request), *asked), tell())

        return answered

    everything = [panel, status, timer]
    panel.preview_models(answer(models.preview), outputs=everything, api_name="preview", **wanted, **at_once)
    panel.switch_models(answer(models.switch), outputs=everything, api_name="switch", **wanted, **at_once)
    panel.load_smaller(answer(models.smaller), None, everything, api_name="smaller", **at_once)
    panel.cancel_loading(answer(models.cancel), None, everything, api_name="cancel", **at_once)
    looks = {"queue": False, "api_name": "shown", **quiet}
    gr.on([blocks.load, timer.tick], answer(models.state), None, everything, **looks)
    raced.then(answer(models.state), None, everything, **looks)


def told(*values: str) -> list[Any]:
    """What the components of the models are told, and the timer with them: it looks again as long as any was told that
    models load. Answers may come out of order, and the models may be ready before an answer has arrived: were the timer
    asked for itself, it could stop while the page still says that they load."""
    return [*values, gr.Timer(active=any(json.loads(value)["state"] == "loading" for value in values))]


def _local(request: gr.Request) -> bool:
    client = request.client
    return is_local(client.host if client else "", request.headers)
