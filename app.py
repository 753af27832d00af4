"""Start the page: `python app.py`, then open the address it prints. Hugging Face Spaces runs this file too.

The page is up before the models are: they load in the background, and a race asked for meanwhile waits for them.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from typing import Any, NoReturn

from specdemo.ui.serving import is_public, on_spaces, on_zerogpu, pair_of_space

if on_zerogpu():
    import spaces  # first, since it puts an emulation in CUDA's place, and only there


def main(arguments: Sequence[str] | None = None) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # both, also where the caller had them ignored
        signal.signal(number, signal.default_int_handler)
    options = _parse(arguments)

    from gradio import tunneling

    from specdemo.limits import OWN, PUBLIC
    from specdemo.ui import page
    from specdemo.ui.access import AccessLog

    public = is_public(options)
    log = AccessLog(sys.stdout if public else None)
    load, limits = partial(_load, options), PUBLIC if public else OWN
    arena: Any
    if options.servers:  # nothing that knows a model is imported then
        from specdemo.served.arena import ServedArena

        arena = ServedArena(options.servers, limits, options.seats)
    elif on_zerogpu():
        from specdemo.ui.zerogpu import ZeroGpuArena

        arena = ZeroGpuArena(load, limits, spaces.GPU)
        arena.load()  # in this thread, where CUDA is emulated, and before the launch, which packs the weights
    else:
        from specdemo.arena import Arena

        arena = Arena(load, limits)
    seats = arena.seats if options.servers else None
    if on_spaces():
        os.environ.setdefault("FORWARDED_ALLOW_IPS", "*")  # only the Hub's proxy comes this near: believe its headers
    blocks = page.build(arena, options.device, public, log, seats)
    words = StringIO()
    try:
        with redirect_stdout(words if options.share else sys.stdout):  # of the tunnel's troubles we tell ourselves
            _, address, public_address = blocks.launch(
                server_name=options.host,
                server_port=options.port,
                share=options.share,
                auth=options.auth,
                root_path=options.root_path,
                prevent_thread_lock=True,
                **page.launch_options(lambda: arena.health, public, log, seats),
            )
    except OSError:
        print(f"Port {options.port} of {options.host} cannot be used: choose another with --port.", file=sys.stderr)
        return 1
    print(f"specdemo is at {address} (Ctrl-C stops it)", flush=True)
    if public_address:
        print(f"and for anyone, for some days, at {public_address}", flush=True)
    elif options.share:
        print("No public link could be made: Gradio's tunnel cannot be reached or started here.", flush=True)
    if options.servers or not on_zerogpu():
        arena.start_loading()
    try:
        threading.Event().wait()
    finally:
        for tunnel in tunneling.CURRENT_TUNNELS:  # programs of their own, which would outlive this one
            tunnel.kill()
    return 0


def _load(options: argparse.Namespace, progress: Callable[[str, float], None]) -> Any:
    """The pair that the options name, on a Space that names none the one for its hardware."""
    import torch

    from specdemo.options import load_pair_from

    if on_spaces() and (options.pair, options.target, options.draft) == (None, "embedded", "auto"):
        options.pair = pair_of_space(torch.cuda.is_available())
    return load_pair_from(options, progress)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    from specdemo.errors import BadRequest
    from specdemo.options import add_model_arguments
    from specdemo.served.options import add_served_arguments, servers_from
    from specdemo.ui.serving import accounts, add_serving_arguments, checked_root_path

    parser = _Parser(description="Standard and speculative decoding side by side, on a local page.", allow_abbrev=False)
    add_serving_arguments(parser)
    add_served_arguments(parser)
    add_model_arguments(parser)
    options = parser.parse_args(arguments)
    try:
        options.servers = servers_from(options)
        options.auth, options.root_path = accounts(options.auth), checked_root_path(options.root_path)
    except BadRequest as error:
        parser.error(str(error))
    return options


if __name__ == "__main__":
    try:
        code = main()
    except KeyboardInterrupt:
        print("\nStopped.", flush=True)
        code = 0
    sys.stdout.flush()
    os._exit(code)  # at once: a model in the middle of a pass would keep the process alive
