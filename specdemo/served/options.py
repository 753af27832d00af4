"""The options that put servers in place of models, for the page and the benchmark alike."""

from __future__ import annotations

import argparse
import os

from ..errors import BadRequest
from .address import Server, servers_of

SEATS, MOST_SEATS = 8, 256
"""Races that a server is given at once; more wait their turn."""


def add_served_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("servers in place of models")
    group.add_argument(
        "--served",
        metavar="standard=URL,speculative=URL",
        help="race two servers that speak OpenAI's protocol (vLLM, SGLang, llama.cpp), such as "
        "standard=http://127.0.0.1:8001,speculative=http://127.0.0.1:8002; no model is loaded here",
    )
    group.add_argument("--model", metavar="NAME", help="the model's name there (default: the only one they have)")
    group.add_argument(
        "--seats", type=int, default=SEATS, metavar="N", help=f"races that the servers get at once (default: {SEATS})"
    )
    group.add_argument("--api-key-env", metavar="VAR", help="the environment variable that holds the servers' key")


def servers_from(args: argparse.Namespace) -> tuple[Server, ...]:
    """The servers that the options name; none where models are loaded here. Raises BadRequest."""
    if not 1 <= args.seats <= MOST_SEATS:
        raise BadRequest(f"--seats is a whole number from 1 to {MOST_SEATS}, not {args.seats}.")
    if args.served is None:
        if args.model is not None or args.api_key_env is not None:
            raise BadRequest("--model and --api-key-env belong to --served: name the servers, or leave them out.")
        return ()
    return servers_of(args.served, args.model, args.api_key_env, environment=os.environ)
