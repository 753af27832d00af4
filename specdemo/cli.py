"""The command line: `python -m specdemo generate | bench | replay | project | plan | distill`.

Standard output holds the result and nothing else; progress, notes and summaries go to standard error. A mistake that
the user can mend is one line and exit code 2, a run that fails exit code 1, Ctrl-C 130. Commands import what they need
when they run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from . import __version__
from .errors import BadRequest, SpecdemoError
from .events import Event, Failed, Finished, Started, settled
from .metrics import Fold, Metrics, fold, speedup
from .options import add_decoding_arguments, add_model_arguments, load_pair_from, settings_from
from .served.address import Server
from .served.options import add_served_arguments, servers_from
from .settings import Settings
from .suite import SUITE, SuitePrompt, read_suite
from .terminal import HeldText, ProgressBar, Screen, has_colours, pieces_of, summary
from .trace import read as read_trace
from .trace import to_json

if TYPE_CHECKING:
    from .models.loading import Pair

__all__ = ["add_decoding_arguments", "add_model_arguments", "load_pair_from", "main", "settings_from"]

FAILED, BAD_ARGUMENTS, INTERRUPTED = 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="replace")
    parser = _parser(next((word for word in arguments if not word.startswith("-")), None))
    try:
        args = parser.parse_args(arguments)
        if args.run is None:
            parser.print_help()
            return 0
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except SpecdemoError as error:
        return _complain(str(error), BAD_ARGUMENTS)
    except KeyboardInterrupt:
        return _complain("Cancelled.", INTERRUPTED)
    except BrokenPipeError:
        # the reader has gone, as `| head` does: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(BAD_ARGUMENTS, f"{self.prog}: {message} (see {self.prog} --help)\n")


@dataclass(frozen=True)
class _Command:
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _parser(wanted: str | None) -> argparse.ArgumentParser:
    """The parser with the arguments of the wanted command; the others are only listed, so that none is imported."""
    parser = _Parser(prog="specdemo", description="Speculative decoding beside standard decoding.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"specdemo {__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, command in COMMANDS.items():
        own = commands.add_parser(name, help=command.help, description=command.help, allow_abbrev=False)
        if name == wanted:
            command.add_arguments(own)
        own.set_defaults(run=command.run)
    return parser


# -- generate ----------------------------------------------------------------------------------------------------------


def _add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what to answer; - reads standard input")
    parser.add_argument(
        "--method",
        default="speculative",
        metavar="NAME",
        help="standard, speculative, prompt-lookup, hybrid or ssd (default: speculative, "
        "which is prompt-lookup where there is no draft model)",
    )
    parser.add_argument("--json", action="store_true", help="print the run's events, one JSON object a line")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="also record the run's events in a file")
    add_model_arguments(parser)
    add_decoding_arguments(parser)


def _generate(args: argparse.Namespace) -> int:
    settings = settings_from(args)
    if args.trace:
        _check_new_file(args.trace)
    prompt = _standard_input() if args.prompt == "-" else args.prompt
    with ExitStack() as stack:
        from . import methods
        from .text import encode_prompt

        if args.method not in methods.METHODS:
            raise BadRequest(f"There is no method {args.method!r}: choose one of {', '.join(methods.METHODS)}.")
        with _progress() as progress:
            pair = load_pair_from(args, progress)
        prompt_ids = encode_prompt(pair.tokenizer, prompt, args.raw)
        trace = stack.enter_context(args.trace.open("w", encoding="utf-8")) if args.trace else None
        stopped = stack.enter_context(_stop_on_interrupt())
        events = methods.run(pair, args.method, prompt_ids, settings, should_stop=lambda: bool(stopped))
        recorded = _recorded(_with_metrics(_with_failure(events, args.method)), trace)
        if args.json:
            return _print_events(recorded)
        return _print_lane(recorded, Screen(sys.stdout))


def _with_failure(events: Iterator[Event], lane: str) -> Iterator[Event]:
    """Turn an error in the middle of a run into the lane's last event; one before it is the user's to mend."""
    from .failures import failure_message

    t = None
    try:
        for event in events:
            yield event
            t = event.t
    except Exception as error:
        if t is None and isinstance(error, SpecdemoError):
            raise
        yield Failed(lane, t or 0.0, failure_message(error))


def _with_metrics(events: Iterator[Event]) -> Iterator[Event]:
    """Attach the metrics to the last event."""
    folded = Fold()
    for event in events:
        folded.add(event)
        yield replace(event, metrics=asdict(folded.metrics())) if isinstance(event, Finished) else event


def _recorded(events: Iterator[Event], file: TextIO | None) -> Iterator[Event]:
    for event in events:
        if file is not None:
            file.write(to_json(event) + "\n")
        yield event


def _print_events(events: Iterator[Event]) -> int:
    code = FAILED
    for event in events:
        sys.stdout.write(to_json(event) + "\n")
        sys.stdout.flush()
        if isinstance(event, Finished):
            code = _exit_code(event)
    return code


def _print_lane(events: Iterator[Event], screen: Screen, pace: Callable[[Event], None] = lambda event: None) -> int:
    """Write a lane's text as it comes and a line end, its numbers to standard error."""
    held, folded, code = HeldText(), Fold(), FAILED
    if screen.colours and has_colours(sys.stderr):
        sys.stderr.write(screen.legend() + "\n")
    for event in events:
        pace(event)
        folded.add(event)
        if isinstance(event, Started):
            held = HeldText(event.settings.get("stop", ()))
            for note in event.notes:
                sys.stderr.write(f"{note}\n")
        elif isinstance(event, Failed):
            screen.stream.write("\n")
            screen.stream.flush()
            return _complain(event.message, FAILED)
        elif isinstance(event, Finished):
            screen.write(held.finish(event.text))
            screen.stream.write("\n")
            screen.stream.flush()
            sys.stderr.write(summary(folded.metrics(), event.finish_reason) + "\n")
            code = _exit_code(event)
        else:
            screen.write(held.push(pieces_of(event)))
    return code


def _exit_code(event: Finished) -> int:
    return INTERRUPTED if event.finish_reason == "cancelled" else 0


@contextmanager
def _stop_on_interrupt() -> Iterator[list[int]]:
    """The first Ctrl-C fills the list, so that the run ends with what it has; a second one interrupts at once."""
    interrupts: list[int] = []

    def note(number: int, _frame: object) -> None:
        interrupts.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)


# -- bench -------------------------------------------------------------------------------------------------------------


def _add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", type=Path, metavar="FILE", help="prompts, JSON lines (default: the project's suite)")
    parser.add_argument("--categories", type=_names, metavar="A,B", help="default: all of the suite's but hostile")
    parser.add_argument(
        "--methods",
        type=_names,
        metavar="A,B",
        help="standard, speculative, prompt-lookup, hybrid, ssd; transformers' own: hf, hf-lookup, hf-assisted, "
        "hf-universal (default: all of ours that can run, hf, and hf-assisted with a draft for it); standard always "
        "runs; speculative:3 drafts 3 tokens, speculative:adaptive as many as pay",
    )
    parser.add_argument("--limit", type=_positive, metavar="N", help="at most N prompts of each category")
    parser.add_argument(
        "--repeats", type=_positive, default=1, metavar="N", help="passes over the prompts (default: 1)"
    )
    parser.add_argument(
        "--assistant",
        metavar="MODEL",
        help="draft model of hf-assisted, or one of another tokenizer for hf-universal, hub id or folder (default: "
        "that of --draft)",
    )
    parser.add_argument(
        "--precisions",
        type=_names,
        metavar="A,B",
        help="run everything with the target kept in each of these, and compare memory, speed and verify cost: half, "
        "float32, lean8 (our own 8 bit on a processor), int8, nf4 (bitsandbytes); in place of --dtype and --quantize",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON document to a file")
    add_served_arguments(parser)
    add_model_arguments(parser)
    add_decoding_arguments(parser, draft_length=_draft_lengths)


def _bench(args: argparse.Namespace) -> int:
    """Of several draft lengths, as in `--draft-length 1,2,4`, every method that drafts runs with each."""
    several = args.draft_length if isinstance(args.draft_length, list) else []
    args.draft_length = max(several, default=args.draft_length)
    settings = settings_from(args)
    if args.out:
        _check_new_file(args.out)
    suite = args.suite or SUITE
    prompts = read_suite(suite, args.categories, args.limit)
    if servers := servers_from(args):
        return _bench_served(args, servers, prompts, settings)
    from . import benchmark

    benchmark.check_methods(args.methods or ())

    def measured(pair: Pair) -> dict[str, Any]:
        lanes = benchmark.make_lanes(pair, args.methods, args.assistant, several)
        results = benchmark.Bench(pair, lanes, prompts, settings, args.repeats, args.raw).measure(progress)
        return results.document(suite=suite.name, dtype=args.dtype)

    with _progress() as progress:
        if args.precisions:
            from . import precisions

            def load(dtype: str, quantize: str) -> Pair:
                args.dtype, args.quantize = dtype, quantize
                return load_pair_from(args, progress)

            document = precisions.measure(args.precisions, load, measured)
            shown = precisions.tables(document)
        else:
            document = measured(load_pair_from(args, progress))
            shown = benchmark.tables(document)
    if args.out:
        args.out.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(shown, end="\n\n")
    print(json.dumps(document, ensure_ascii=False))
    return 0


def _bench_served(
    args: argparse.Namespace, servers: Sequence[Server], prompts: Sequence[SuitePrompt], settings: Settings
) -> int:
    """The lanes are the servers', so no method is chosen here."""
    if args.methods:
        raise BadRequest("With --served each server runs the method that it was started with: leave out --methods.")
    from .served.arena import ServedArena
    from .served.bench import measure, tables

    arena = ServedArena(servers)
    try:
        with _progress() as progress:
            document = measure(arena, prompts, settings, args.repeats, args.raw, progress)
    finally:
        arena.close()
    if args.out:
        args.out.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(tables(document), end="\n\n")
    print(json.dumps(document, ensure_ascii=False))
    return 0


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("at least one name is needed")
    return names


def _draft_lengths(text: str) -> list[int]:
    try:
        return sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"a whole number, or several with commas, is needed, not {text!r}") from None


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on is needed, not {text!r}")
    return number


# -- replay ------------------------------------------------------------------------------------------------------------


def _add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a run recorded by generate --json or --trace")
    parser.add_argument(
        "--speed",
        type=_speed,
        metavar="X",
        help="1 is the true speed of each lane, 2 twice that, 0 at once (default: 1 on a terminal, else 0)",
    )
    parser.add_argument(
        "--html", type=Path, metavar="OUT", help="print nothing: write a file that replays the run in any browser"
    )


def _replay(args: argparse.Namespace) -> int:
    if args.html:
        return _replay_as_page(args.file, args.html)
    lanes: dict[str, list[Event]] = {}
    for event in settled(read_trace(args.file)):
        lanes.setdefault(event.lane, []).append(event)
    if not lanes:
        raise BadRequest(f"{args.file.name} holds no events: record a run with generate --trace FILE.")
    screen = Screen(sys.stdout)
    speed = args.speed if args.speed is not None else 1.0 if screen.terminal else 0.0
    code = 0
    for index, (lane, events) in enumerate(lanes.items()):
        if len(lanes) > 1:
            print("\n" * (index > 0) + f"== {lane}", flush=True)
        code = max(code, _print_lane(iter(events), screen, _Pace(speed)))
        if not isinstance(events[-1], Finished | Failed):
            print(flush=True)
            code = _complain(f"The recording of {lane} ends before the run does.", FAILED)
    if "standard" in lanes:
        standard = fold(lanes.pop("standard"))
        for lane, events in lanes.items():
            _report_speedup(lane, fold(events), standard)
    return code


def _replay_as_page(source: Path, out: Path) -> int:
    from .ui import export

    _check_new_file(out)
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"The trace {source} cannot be read: {error}.") from None
    out.write_text(export.as_page(export.read(text)), encoding="utf-8")
    return 0


def _report_speedup(lane: str, metrics: Metrics, standard: Metrics) -> None:
    ratio = speedup(standard, metrics)
    if ratio is not None:
        sys.stderr.write(f"{lane}: {ratio:.2f} x the speed of standard\n")


class _Pace:
    """Waits until an event's engine time has come, `speed` times faster than it was; not at all at speed 0."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self._begin = time.monotonic()

    def __call__(self, event: Event) -> None:
        if self._speed:
            time.sleep(max(0.0, self._begin + event.t / self._speed - time.monotonic()))


def _speed(text: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = -1.0
    if not 0.0 <= speed < float("inf"):
        raise argparse.ArgumentTypeError(f"a number from 0 on is needed, not {text!r}")
    return speed


# -- project -----------------------------------------------------------------------------------------------------------


def _add_project_arguments(parser: argparse.ArgumentParser) -> None:
    from .projection import MEASURED, PROFILES

    parser.add_argument("file", type=Path, metavar="TRACE", help="lanes of standard, speculative and ssd, one prompt")
    parser.add_argument(
        "--profile",
        default=MEASURED,
        metavar="NAME",
        help=f"whose latencies: {', '.join([MEASURED, *PROFILES])} (default: {MEASURED}, in the recording)",
    )


def _project(args: argparse.Namespace) -> int:
    from .projection import project, table_of

    projection = project(read_trace(args.file), args.profile)
    print("\n".join(table_of(projection)))
    return 0 if projection.lanes else FAILED


# -- distill -----------------------------------------------------------------------------------------------------------


def _add_distill_arguments(parser: argparse.ArgumentParser) -> None:
    from .distill import command

    command.add_arguments(parser)


def _distill(args: argparse.Namespace) -> int:
    from .distill import command

    return command.run(args)


# -- plan --------------------------------------------------------------------------------------------------------------


def _add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    from .plan import command

    command.add_arguments(parser)


def _plan(args: argparse.Namespace) -> int:
    from .plan import command

    return command.run(args)


# -- serve-plan --------------------------------------------------------------------------------------------------------


def _add_serve_plan_arguments(parser: argparse.ArgumentParser) -> None:
    from .served import command

    command.add_arguments(parser)


def _serve_plan(args: argparse.Namespace) -> int:
    from .served import command

    return command.run(args)


COMMANDS = {
    "generate": _Command(
        "Answer a prompt, every drafted token in the colour of its fate.", _add_generate_arguments, _generate
    ),
    "bench": _Command("Measure methods against each other on a suite of prompts.", _add_bench_arguments, _bench),
    "replay": _Command("Print a recorded run.", _add_replay_arguments, _replay),
    "project": _Command("Tell what SSD would do with a device for each model.", _add_project_arguments, _project),
    "plan": _Command("Tell what fits where, in which precision; nothing is loaded.", _add_plan_arguments, _plan),
    "serve-plan": _Command(
        "Tell how to bring up both servers of a served race; nothing is loaded.", _add_serve_plan_arguments, _serve_plan
    ),
    "distill": _Command("Train a small draft model for a target.", _add_distill_arguments, _distill),
}


# -- streams and files -------------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[ProgressBar]:
    bar = ProgressBar(sys.stderr)
    try:
        yield bar
    finally:
        bar.clear()


def _standard_input() -> str:
    """All of standard input, less the line end that shells put at the end."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin.read().removesuffix("\n").removesuffix("\r")


def _check_new_file(path: Path) -> None:
    """Before the work, not after it. What is there already is overwritten only when there is something to write."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadRequest(f"{path} cannot be written: choose a file in a folder that exists and is yours to write.")


def _complain(message: str, code: int) -> int:
    sys.stderr.write(f"specdemo: {message}\n")
    return code
