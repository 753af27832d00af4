"""Which servers: `standard=URL,speculative=URL`, the model's name there, and a key that is never shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from ..errors import BadRequest

LANES = ("standard", "speculative")

_FORM = "give both lanes, as standard=http://HOST:PORT,speculative=http://HOST:PORT"


@dataclass(frozen=True, slots=True, repr=False)
class Key:
    """A secret. It prints as nothing, so that it gets into no message and no log by accident."""

    value: str = ""

    def __repr__(self) -> str:
        return "Key()"

    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.value}"} if self.value else {}

    def hidden_in(self, text: str) -> str:
        """The text without the key, should a server have repeated it."""
        return text.replace(self.value, "(key)") if self.value else text


@dataclass(frozen=True, slots=True)
class Server:
    """One lane's server. `url` ends before `/v1`; `model` is None where the server's only one is meant."""

    lane: str
    url: str
    model: str | None = None
    key: Key = Key()

    @property
    def host(self) -> str:
        """As it is named in messages."""
        return urlsplit(self.url).netloc


def servers_of(
    served: str, model: str | None = None, key_variable: str | None = None, *, environment: Mapping[str, str]
) -> tuple[Server, ...]:
    """The servers that `--served`, `--model` and `--api-key-env` name, in the order of LANES. Raises BadRequest."""
    urls: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in served.split(","))):
        lane, sign, url = part.partition("=")
        if not sign or lane not in LANES or lane in urls:
            raise BadRequest(f"{part.partition('?')[0]!r} names no lane's server: {_FORM}.")
        urls[lane] = _checked(lane, url)
    if set(urls) != set(LANES):
        raise BadRequest(f"--served needs a server for each lane: {_FORM}.")
    key = Key()
    if key_variable is not None:
        key = Key(environment.get(key_variable, "").strip())
        if not key.value:
            raise BadRequest(f"The variable {key_variable} holds no key: set it, or leave out --api-key-env.")
        if not (key.value.isascii() and key.value.isprintable()):
            raise BadRequest(f"The key in the variable {key_variable} has characters that no key has: set it again.")
    return tuple(Server(lane, urls[lane], model, key) for lane in LANES)


def _checked(lane: str, url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
        raise BadRequest(f"The address of the {lane} server must not hold a key: name a variable with --api-key-env.")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise BadRequest(f"The address of the {lane} server is none: write it like http://127.0.0.1:8000.")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")
