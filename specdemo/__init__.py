"""Speculative decoding beside standard decoding: the same text, sooner, and every drafted token accounted for.

As a library:

    from specdemo import Settings, encode_prompt, fold, load_pair, run

    pair = load_pair()
    prompt_ids = encode_prompt(pair.tokenizer, "Why is the sky blue?")
    events = list(run(pair, "speculative", prompt_ids, Settings(max_new_tokens=64)))
    print(events[-1].text, fold(events).tokens_per_second)

`load_pair` gives models, `run` a generator of events by a method's name (`standard` and `speculative` are the engines
beneath it), `fold` the metrics of a lane, `read_trace` and `write_trace` recorded runs. Names are imported when first
used, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceptance import Verdict, judge
    from .arena import Arena
    from .engines.job import Job
    from .engines.speculative import speculative
    from .engines.standard import standard
    from .errors import BadRequest, ModelUnavailable, SpecdemoError
    from .events import Event
    from .methods import METHODS, run
    from .metrics import Metrics, first_divergence, fold, speedup
    from .models.loading import Pair, load_pair
    from .request import RaceRequest
    from .settings import Settings
    from .text import encode_prompt
    from .trace import read as read_trace
    from .trace import write as write_trace

__version__ = "0.1.0"

_HOME = {
    "Arena": "arena",
    "BadRequest": "errors",
    "Event": "events",
    "Job": "engines.job",
    "METHODS": "methods",
    "Metrics": "metrics",
    "ModelUnavailable": "errors",
    "Pair": "models.loading",
    "RaceRequest": "request",
    "Settings": "settings",
    "SpecdemoError": "errors",
    "Verdict": "acceptance",
    "encode_prompt": "text",
    "first_divergence": "metrics",
    "fold": "metrics",
    "judge": "acceptance",
    "load_pair": "models.loading",
    "read_trace": "trace",
    "run": "methods",
    "speculative": "engines.speculative",
    "speedup": "metrics",
    "standard": "engines.standard",
    "write_trace": "trace",
}
_RENAMED = {"read_trace": "read", "write_trace": "write"}

__all__ = [
    "METHODS",
    "Arena",
    "BadRequest",
    "Event",
    "Job",
    "Metrics",
    "ModelUnavailable",
    "Pair",
    "RaceRequest",
    "Settings",
    "SpecdemoError",
    "Verdict",
    "encode_prompt",
    "first_divergence",
    "fold",
    "judge",
    "load_pair",
    "read_trace",
    "run",
    "speculative",
    "speedup",
    "standard",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), _RENAMED.get(name, name))
