"""Start the page: `python app.py`, then open the address it prints. Hugging Face Spaces runs this file too.

The page is up before the models are: they load in the background, and a race asked for meanwhile waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # both, also where the caller had them ignored
        signal.signal(number, signal.default_int_handler)
    options = _parse(arguments)

    from gradio import tunneling

    from specdemo.arena import Arena
    from specdemo.options import load_pair_from
    from specdemo.ui import page

    arena = Arena(lambda progress: load_pair_from(options, progress))
    blocks = page.build(arena, options.device)
    try:
        _, address, public_address = blocks.launch(
            server_name=options.host,
            server_port=options.port,
            share=options.share,
            prevent_thread_lock=True,
            **page.launch_options(),
        )
    except OSError:
        print(f"Port {options.port} of {options.host} cannot be used: choose another with --port.", file=sys.stderr)
        return 1
    print(f"specdemo is at {address} (Ctrl-C stops it)", flush=True)
    if public_address:
        print(f"and for anyone, for some days, at {public_address}", flush=True)
    arena.start_loading()
    try:
        threading.Event().wait()
    finally:
        for tunnel in tunneling.CURRENT_TUNNELS:  # programs of their own, which would outlive this one
            tunnel.kill()
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from specdemo.options import add_model_arguments

    parser = _Parser(description="Standard and speculative decoding side by side, on a local page.", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=7860, help="port to listen on (default: 7860)")
    parser.add_argument("--share", action="store_true", help="also open a public address through Gradio's tunnel")
    add_model_arguments(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        print("\nStopped.", flush=True)
        code = 0
    sys.stdout.flush()
    os._exit(code)  # at once: a model in the middle of a pass would keep the process alive
