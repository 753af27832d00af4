"""What goes wrong with a server, each as one sentence that names the lane and the host and says what to do.

What a server says of itself is quoted only after the key, line ends and control characters are out of it, and cut
short: it may repeat anything.
"""

from __future__ import annotations

import json
from typing import Any

from ..errors import SpecdemoError
from .address import Server

LONGEST_QUOTE = 200


class ServerFault(SpecdemoError):
    """A lane that its server cannot serve. `passing`: asking again a moment later may help; `wait_s`: the server's own
    word on how long."""

    def __init__(self, message: str, passing: bool = False, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.passing = passing
        self.wait_s = wait_s


def unreachable(server: Server) -> ServerFault:
    return ServerFault(
        f"The {server.lane} server at {server.host} cannot be reached: start it, or check the address.", passing=True
    )


def unasked(server: Server, error: Exception) -> ServerFault:
    return ServerFault(
        f"The {server.lane} server at {server.host} could not be asked ({type(error).__name__}): check the address."
    )


def broken_off(server: Server) -> ServerFault:
    return ServerFault(f"The {server.lane} server at {server.host} broke off in the middle: try again.", passing=True)


def stalled(server: Server, seconds: float, began: bool) -> ServerFault:
    what = "sent nothing more" if began else "sent no token"
    return ServerFault(
        f"The {server.lane} server at {server.host} {what} for {seconds:.0f} seconds: it may be overloaded, try again."
    )


def malformed(server: Server, why: str) -> ServerFault:
    return ServerFault(
        f"The {server.lane} server at {server.host} sent what is no answer ({why}): check that it speaks OpenAI's "
        "protocol."
    )


def wrong_model(server: Server, names: list[str]) -> ServerFault:
    known = ", ".join(quoted(server, name) for name in names[:5])
    return ServerFault(
        f"The {server.lane} server at {server.host} does not have the model {server.model}: choose with --model from "
        f"{known or 'those that it lists'}."
    )


def refused(server: Server, status: int, body: str, retry_after: str | None = None) -> ServerFault:
    """For an answer that is none of success."""
    who, said = f"The {server.lane} server at {server.host}", _reason(server, body)
    if status in (401, 403):
        how = "refuses the key" if server.key.value else "wants a key"
        return ServerFault(f"{who} {how} ({status}): name the variable that holds it with --api-key-env.")
    if status == 404:
        return ServerFault(f"{who} does not know what it was asked for (404){said}: check the address and --model.")
    if status == 429:
        return ServerFault(f"{who} has too many requests (429): try again in a moment.", True, _seconds(retry_after))
    if status in (502, 503, 504):
        return ServerFault(f"{who} is not ready ({status}){said}: try again.", True, _seconds(retry_after))
    if 300 <= status < 400:
        return ServerFault(f"{who} points elsewhere ({status}), and only hosts named at the start are asked.")
    if status >= 500:
        return ServerFault(f"{who} failed ({status}){said}: look at its log.")
    return ServerFault(f"{who} refuses the request ({status}){said}.")


def failed_midway(server: Server, error: Any) -> ServerFault:
    """For an error that came inside a stream."""
    said = _reason(server, json.dumps({"error": error}))
    return ServerFault(f"The {server.lane} server at {server.host} failed in the middle{said}: look at its log.")


def quoted(server: Server, text: str) -> str:
    """A server's words, harmless and short."""
    plain = server.key.hidden_in(" ".join("".join(c if c.isprintable() else " " for c in text).split()))
    return plain if len(plain) <= LONGEST_QUOTE else plain[: LONGEST_QUOTE - 1] + "…"


def _reason(server: Server, body: str) -> str:
    """What the answer says, as the end of a sentence; empty where it says nothing that a reader can use."""
    try:
        said = json.loads(body)
        said = said.get("error", said) if isinstance(said, dict) else said
        said = said.get("message") if isinstance(said, dict) else said
    except (ValueError, RecursionError):
        said = None
    text = quoted(server, said).rstrip(".") if isinstance(said, str) else ""
    return f", saying “{text}”" if text else ""


def _seconds(retry_after: str | None) -> float | None:
    return float(retry_after) if retry_after and retry_after.isascii() and retry_after.isdecimal() else None
