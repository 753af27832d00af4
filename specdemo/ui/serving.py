"""How the page is reached: address, login, the public link, and whether strangers are expected.

Nothing of Gradio is imported here, so that a mistyped option is answered at once.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from ..errors import BadRequest

FROM_ENVIRONMENT = "env:"
PAIR_VARIABLE = "SPECDEMO_PAIR"


def on_spaces(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this runs as a Hugging Face Space."""
    return bool(environment.get("SPACE_ID"))


def on_zerogpu(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether that Space borrows its card for each run, by the sign that the package `spaces` itself goes by."""
    return environment.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def pair_of_space(has_card: bool, environment: Mapping[str, str] = os.environ) -> str | None:
    """The pair that a Space runs, which has no command line: the one that its variable names, else on a card the best
    that fits, else None, the embedded one."""
    return environment.get(PAIR_VARIABLE) or ("auto" if has_card else None)


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the page listens and who may come. On a Space it listens to all, since the Hub's proxy stands before it."""
    group = parser.add_argument_group("page")
    host = "0.0.0.0" if on_spaces() else "127.0.0.1"
    group.add_argument("--host", default=host, help="address to listen on (default: this machine only)")
    group.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    group.add_argument(
        "--public",
        action="store_true",
        help="strangers reach the page: short runs, one a visitor, an access log, nothing but the race (on by itself "
        "on Spaces and with --share)",
    )
    group.add_argument(
        "--share", action="store_true", help="also open a public address for some days, through Gradio's tunnel"
    )
    group.add_argument(
        "--root-path", metavar="PATH", help="where a reverse proxy shows the page: /demo, or a whole address"
    )
    group.add_argument(
        "--auth",
        metavar="SOURCE",
        help="ask for a login: a file with user:password on each line, or env:NAME for a variable that holds them",
    )


def is_public(options: argparse.Namespace) -> bool:
    """Whether strangers are expected."""
    return options.public or options.share or on_spaces()


def accounts(source: str | None, environment: Mapping[str, str] = os.environ) -> list[tuple[str, str]] | None:
    """The logins that `--auth` names: (user, password) each; None where none is asked for. Raises BadRequest."""
    if source is None:
        return None
    if source.startswith(FROM_ENVIRONMENT):
        text = environment.get(source.removeprefix(FROM_ENVIRONMENT), "")
        where = f"the variable {source.removeprefix(FROM_ENVIRONMENT)}"
    else:
        try:
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, ValueError):  # what was meant as a password is not repeated
            raise BadRequest(
                "--auth takes a file that can be read, or env:NAME: a password in the command line is seen by everyone "
                "on this machine."
            ) from None
        where = f"the file {source}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    found = [(user, password) for user, _, password in (line.partition(":") for line in lines)]
    if not found or not all(user and password for user, password in found):
        raise BadRequest(f"--auth found no user:password, or a line that is none, in {where}.")
    return found


def checked_root_path(path: str | None) -> str | None:
    """`--root-path` as Gradio takes it. Raises BadRequest."""
    if path is None or path.startswith(("/", "http://", "https://")):
        return path
    raise BadRequest("--root-path is a path that begins with / or an address that begins with http.")
