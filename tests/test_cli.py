"""The command line: what goes to which stream, what each command promises, and how mistakes are told."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_folders import save_folder

from specdemo import cli, trace
from specdemo.events import Committed, Event, Failed, Finished, JudgedToken, Prefilled, Started, Verified
from specdemo.metrics import fold
from specdemo.terminal import HeldText, Piece, ProgressBar, Screen, pieces_of, table

ROOT = Path(__file__).parents[1]
PROMPT = "Why is the sky blue?"


class Result(NamedTuple):
    code: int
    out: str
    err: str


def run(*arguments: str) -> Result:
    """A command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = cli.main(arguments)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_target: Any, tiny_draft: Any) -> list[str]:
    """Arguments that name the tiny pair, in folders."""
    folder = tmp_path_factory.mktemp("models")
    target, draft = save_folder(tiny_target, folder / "target"), save_folder(tiny_draft, folder / "draft")
    return ["--target", str(target), "--draft", str(draft), "--dtype", "float32", "--device", "cpu"]


def generate(models: Sequence[str], *arguments: str, prompt: str = PROMPT) -> Result:
    return run("generate", "--prompt", prompt, *models, "--max-new-tokens", "24", "--ignore-eos", *arguments)


def events_of(result: Result) -> list[Event]:
    return [trace.from_json(line) for line in result.out.splitlines()]


def finished(result: Result) -> Finished:
    event = events_of(result)[-1]
    assert isinstance(event, Finished)
    return event


# -- generate ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["standard", "speculative", "prompt-lookup", "hybrid", "ssd"])
def test_piped_output_is_the_text_and_a_line_end(models: list[str], method: str) -> None:
    said = generate(models, "--method", method)
    told = generate(models, "--method", method, "--json")
    assert said.code == told.code == 0
    assert said.out == finished(told).text + "\n"
    assert said.out == generate(models, "--method", "standard").out  # greedy in float32: all methods agree
    assert "24 tokens in " in said.err
    assert "\x1b" not in said.out + said.err


def test_json_lines_are_the_run_and_its_metrics(models: list[str]) -> None:
    events = events_of(generate(models, "--json"))
    assert [event.type for event in events[:4]] == ["started", "prefilled", "drafted", "verified"]
    last = events[-1]
    assert isinstance(last, Finished)
    assert (last.finish_reason, len(last.token_ids)) == ("length", 24)
    metrics = dict(last.metrics)
    assert metrics == json.loads(json.dumps(cli.asdict(fold(events))))
    assert metrics["drafted"] > metrics["accepted"] > 0  # a draft model that is right and wrong at times ran
    started = events[0]
    assert isinstance(started, Started)
    assert (started.method, started.draft_precision) == ("speculative", "float32")


def test_options_reach_the_run(models: list[str]) -> None:
    given = {
        "max_new_tokens": 7, "temperature": 0.5, "top_k": 9, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.5,
        "seed": 3, "draft_length": 2, "verification": "block", "adaptive": True, "stop": ["abc", "d"],
        "ignore_eos": True, "fan_out": "geometric", "fan_out_budget": 5, "saguaro": 0.5, "fallback": "prompt-lookup",
    }  # fmt: skip
    words = [word for name, value in given.items() for word in option(name, value)]
    started = events_of(run("generate", "--prompt", PROMPT, *models, "--json", *words))[0]
    assert isinstance(started, Started)
    assert dict(started.settings) == given


def option(name: str, value: object) -> list[str]:
    flag = "--" + name.replace("_", "-")
    if value is True:
        return [flag]
    return [word for item in (value if isinstance(value, list) else [value]) for word in (flag, str(item))]


def test_a_stop_string_is_never_printed(models: list[str]) -> None:
    text = generate(models).out
    stop = text[10:13]
    stopped = generate(models, "--stop", stop)
    assert stopped.out == text[: text.index(stop)] + "\n"
    assert finished(generate(models, "--stop", stop, "--json")).finish_reason == "stop"


def test_without_a_draft_model_prompt_lookup_runs_and_says_so(models: list[str]) -> None:
    alone = generate(models, "--draft", "none")
    assert alone.out == generate(models).out
    assert "has no draft model here, so prompt-lookup runs in place of speculative." in alone.err
    started = events_of(generate(models, "--draft", "none", "--json"))[0]
    assert isinstance(started, Started)
    assert (started.method, started.draft) == ("prompt-lookup", None)


def test_a_chat_template_is_used_unless_raw(models: list[str], tmp_path: Path, tiny_target: Any) -> None:
    folder = save_folder(tiny_target, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")
    chat = ["--target", str(folder), *models[2:]]
    lengths = {}
    for name, options in {"raw": ["--raw"], "chat": []}.items():
        started = events_of(generate(chat, "--json", *options))[0]
        assert isinstance(started, Started)
        lengths[name] = len(started.prompt_ids)
    assert lengths["chat"] == lengths["raw"] + 2


def test_the_prompt_can_come_from_standard_input(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert generate(models, prompt="-").out == generate(models).out


def test_a_run_is_recorded_as_it_is_printed(models: list[str], tmp_path: Path) -> None:
    recorded = generate(models, "--json", "--trace", str(tmp_path / "run.jsonl"))
    assert (tmp_path / "run.jsonl").read_text(encoding="utf-8") == recorded.out


class InterruptedAfter(io.StringIO):
    """A stream whose reader presses Ctrl-C after some lines."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.left = lines

    def write(self, text: str) -> int:
        self.left -= text.count("\n")
        if self.left == 0:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_an_interrupt_ends_the_run_with_what_it_has(models: list[str]) -> None:
    out = InterruptedAfter(6)
    before = signal.getsignal(signal.SIGINT)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = cli.main(["generate", "--prompt", PROMPT, *models, "--json", "--ignore-eos", "--max-new-tokens", "200"])
    last = finished(Result(code, out.getvalue(), ""))
    assert (code, last.finish_reason) == (130, "cancelled")
    shown = "".join(
        piece.text for event in events_of(Result(0, out.getvalue(), "")) for piece in pieces_of(event) if piece.kept
    )
    assert last.text == shown
    assert 0 < len(last.token_ids) < 200
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.process
def test_the_module_is_a_program(models: list[str], tmp_path: Path) -> None:
    """The whole way in a process of its own, with the prompt from a pipe and Ctrl-C in the middle."""
    arguments = [
        "generate",
        "--prompt",
        "-",
        *models,
        "--ignore-eos",
        "--max-new-tokens",
        "450",
        "--trace",
        "run.jsonl",
    ]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-m", "specdemo", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, text=True, env=environment, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(PROMPT)
        process.stdin.close()
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, err = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130, err
    *_, last = trace.read(tmp_path / "run.jsonl")
    assert isinstance(last, Finished)
    assert last.finish_reason == "cancelled"
    assert first + rest == last.text + "\n"
    assert "ended by cancelled" in err


def test_a_failure_in_the_run_is_its_last_event(models: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from specdemo import methods

    def breaking(*_args: Any, **_kwargs: Any) -> Any:
        yield Started("standard", 0.0, "standard", "tiny", "float32", "lean", "cpu", {}, (1,))
        raise MemoryError

    monkeypatch.setattr(methods, "run", breaking)
    told = generate(models, "--json")
    failed = events_of(told)[-1]
    assert isinstance(failed, Failed)
    assert told.code == 1
    assert failed.message.startswith("The memory ran out")
    said = generate(models)
    assert (said.code, said.out, said.err.splitlines()[-1]) == (1, "\n", f"specdemo: {failed.message}")


# -- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(["generate"], "required: --prompt", id="no prompt"),
        pytest.param(["generate", "--prompt", "a", "--temperature", "-1"], "from 0 to 100", id="temperature"),
        pytest.param(["generate", "--prompt", "a", "--temperature", "nan"], "must be a number", id="no number"),
        pytest.param(["generate", "--prompt", "a", "--draft-length", "17"], "from 0 to 16", id="draft length"),
        pytest.param(["generate", "--prompt", "a", "--seed", "x"], "invalid int value", id="seed"),
        pytest.param(["generate", "--prompt", "a", "--stop", ""], "at least one character", id="stop"),
        pytest.param(["generate", "--prompt", "a", "--verification", "b"], "'token' or 'block'", id="verification"),
        pytest.param(["generate", "--prompt", "a", "--method", "hf"], "no method 'hf'", id="method"),
        pytest.param(["generate", "--prompt", "a", "--target", "/no/such/folder"], "no folder", id="target"),
        pytest.param(["generate", "--prompt", "a", "--trace", "/no/such/file"], "cannot be written", id="trace"),
        pytest.param(["generate", "--prompt", "a", "--max", "3"], "unrecognized", id="abbreviation"),
        pytest.param(["bench", "--suite", "/no/such/file"], "cannot be read", id="suite"),
        pytest.param(["bench", "--categories", "chat,cats"], "no category 'cats'", id="category"),
        pytest.param(["bench", "--methods", "standard,magic"], "no method 'magic'", id="bench method"),
        pytest.param(["bench", "--limit", "0"], "a whole number from 1", id="limit"),
        pytest.param(["bench", "--repeats", "no"], "a whole number from 1", id="repeats"),
        pytest.param(["bench", "--out", "/no/such/file"], "cannot be written", id="out"),
        pytest.param(["replay", "/no/such/file"], "cannot be read", id="recording"),
        pytest.param(["replay", "README.md"], "line 1", id="no recording"),
        pytest.param(["replay", os.devnull], "holds no events", id="empty recording"),
        pytest.param(["replay", "x", "--speed", "-2"], "a number from 0", id="speed"),
        pytest.param(["distill"], "required: --out", id="distill without a folder"),
        pytest.param(["distill", "--out", "x", "--minutes", "-1"], "above 0", id="distill for no time"),
        pytest.param(["dance"], "invalid choice: 'dance'", id="command"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_code_2(arguments: list[str], reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.count("\n") == 1
    assert reason in result.err


def test_a_prompt_that_cannot_be_served_is_a_mistake(models: list[str]) -> None:
    for prompt, reason in (("  ", "empty"), ("a" * 600, "600 tokens"), ("a\udc80", "half a character")):
        result = generate(models, prompt=prompt)
        assert (result.code, result.out) == (2, "")
        assert reason in result.err.splitlines()[-1]


def test_without_arguments_help_is_printed() -> None:
    assert "generate" in run().out
    assert run().code == 0
    assert run("--version").out.startswith("specdemo ")
    assert "--max-new-tokens" in run("generate", "--help").out


@pytest.mark.process
def test_help_is_quick_and_a_closed_pipe_is_no_error() -> None:
    probe = "import sys; from specdemo import cli; cli.main([]); print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, cwd=ROOT).stdout.endswith(
        "set()\n"
    )
    command = f'"{sys.executable}" -m specdemo --help | true'
    assert subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT).stderr == ""


# -- replay ------------------------------------------------------------------------------------------------------------


def test_a_recorded_run_is_printed_again(models: list[str], tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    recording.write_text(generate(models, "--json").out, encoding="utf-8")
    again = run("replay", str(recording))
    assert (again.code, again.out) == (0, generate(models).out)
    assert "24 tokens in " in again.err


def test_a_race_is_replayed_lane_by_lane(models: list[str], tmp_path: Path) -> None:
    lanes = [events_of(generate(models, "--json", "--method", name)) for name in ("standard", "speculative")]
    trace.write(
        tmp_path / "race.jsonl",
        [event for pair in zip(*lanes, strict=False) for event in pair] + lanes[0][len(lanes[1]) :],
    )
    text = generate(models).out
    again = run("replay", str(tmp_path / "race.jsonl"))
    assert again.out == f"== standard\n{text}\n== speculative\n{text}"
    assert "speculative: " in again.err.splitlines()[-1]


def test_a_broken_off_recording_shows_what_it_has(models: list[str], tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    recording.write_text("".join(generate(models, "--json").out.splitlines(keepends=True)[:4]), encoding="utf-8")
    again = run("replay", str(recording))
    assert again.code == 1
    assert generate(models).out.startswith(again.out.strip())
    assert again.out.strip()
    assert "ends before the run does" in again.err


def test_replay_waits_for_the_time_of_each_event(
    models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = tmp_path / "run.jsonl"
    recording.write_text(generate(models, "--json").out, encoding="utf-8")
    *_, last = trace.read(recording)
    now, waits = 0.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)

    monkeypatch.setattr(cli.time, "sleep", sleep)
    monkeypatch.setattr(cli.time, "monotonic", lambda: now)
    assert run("replay", str(recording), "--speed", "2").code == 0
    assert sum(waits) == pytest.approx(last.t / 2)
    waits.clear()
    assert run("replay", str(recording)).code == 0
    assert waits == []


# -- the terminal ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def set_environment(no_color: str | None = None, term: str = "xterm") -> None:
        monkeypatch.setenv("TERM", term)
        monkeypatch.delenv("NO_COLOR", raising=False)
        if no_color is not None:
            monkeypatch.setenv("NO_COLOR", no_color)

    set_environment()
    return set_environment


def judged(text: str, fate: Any) -> JudgedToken:
    return JudgedToken(id=5, text=text, fate=fate, p=0.5, q=0.5, raw_p=None, acceptance=1.0, uniform=0.1)


ROUND = Verified(
    lane="speculative", t=1.0, round=1, verify_s=0.1, judge_s=0.1,
    judged=(judged("one", "accepted"), judged(" two", "rejected"), judged(" three\n", "discarded")),
    num_accepted=1, extra=Committed(5, " four", 0.5), extra_kind="recovered",
)  # fmt: skip


def test_fates_are_coloured_where_the_tokens_fell(colours: Any) -> None:
    screen = Screen(Terminal())
    screen.write(pieces_of(Prefilled("speculative", 0.1, 0.1, 0.0, Committed(5, "First ", 0.5))))
    screen.write(pieces_of(ROUND))
    written = screen.stream.getvalue()  # type: ignore[attr-defined]
    assert written == (
        "First \x1b[4;38;5;36mone\x1b[0m\x1b[9;38;5;166m two\x1b[0m\x1b[2;9;38;5;245m three↵\x1b[0m"
        "\x1b[1;38;5;172m four\x1b[0m"
    )
    assert "\x1b[9;38;5;166mrejected\x1b[0m" in screen.legend()


@pytest.mark.parametrize("environment", [{"no_color": "1"}, {"term": "dumb"}])
def test_without_colours_only_kept_text_is_shown(colours: Any, environment: dict[str, str]) -> None:
    colours(**environment)
    screen = Screen(Terminal())
    screen.write(pieces_of(ROUND))
    assert screen.stream.getvalue() == "one four"  # type: ignore[attr-defined]
    assert screen.legend() == ""


def test_a_model_cannot_steer_the_terminal_and_a_pipe_gets_its_text(colours: Any) -> None:
    text = "\x1b]0;title\x07 \x9b2J\tok\n"
    for stream, expected in ((Terminal(), "␛]0;title␇ \ufffd2J\tok\n"), (io.StringIO(), text)):
        Screen(stream).write([Piece(text)])
        assert stream.getvalue() == expected


def test_clipped_tokens_are_not_shown() -> None:
    event = Verified("s", 1.0, 1, 0.1, 0.1, (judged("a", "accepted"), judged("b", "clipped")), 1, None, None)
    assert pieces_of(event) == [Piece("a", "accepted")]


def test_standard_tokens_have_no_fate() -> None:
    event = Verified("s", 1.0, 1, 0.1, 0.1, (), 0, Committed(5, "x", 0.5), "bonus")
    assert pieces_of(event) == [Piece("x", "")]


@given(
    st.lists(st.tuples(st.text("ab", max_size=3), st.sampled_from(["", "accepted", "rejected"])), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=2),
)
def test_nothing_printed_is_ever_taken_back(tokens: list[tuple[str, str]], stop: list[str]) -> None:
    held, printed, text, ended = HeldText(stop), "", "", False
    for added, style in tokens:
        pieces = held.push([Piece(added, style)])
        printed += "".join(piece.text for piece in pieces if piece.kept)
        text += added if style != "rejected" else ""
        if found := [text.index(end) for end in stop if end in text]:
            text, ended = text[: min(found)], True
        assert text.startswith(printed)
        if ended:
            break
        held_back = text[len(printed) :]
        assert held_back == "" or any(end.startswith(held_back) for end in stop)  # no more than must be
    assert printed + "".join(piece.text for piece in held.finish(text) if piece.kept) == text


def test_refused_tokens_keep_their_place_when_text_is_held() -> None:
    held = HeldText(["abc"])
    assert held.push([Piece("xa"), Piece("no", "rejected"), Piece("b", "recovered")]) == [Piece("x")]
    assert held.push([Piece("d")]) == [Piece("a"), Piece("no", "rejected"), Piece("b", "recovered"), Piece("d")]


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    held = HeldText()
    assert held.push([Piece("a"), Piece("")]) == [Piece("a")]
    assert held.finish("a\ufffd") == [Piece("\ufffd")]


def test_progress_is_drawn_on_a_terminal_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        bar = ProgressBar(stream)
        bar("Loading a long name", 0.5)
        bar("Ready", 1.0)
        bar.clear()
    assert pipe.getvalue() == ""
    assert "[############............]  50 % Loading a long name\r" in terminal.getvalue()
    last = terminal.getvalue().split("\r")[-2]
    assert last.strip() == ""
    assert len(last) >= len("[########################] 100 % Ready")


def test_a_table_lines_up() -> None:
    assert table(["name", "n"], [["a", "10"], ["long name", "2"]]) == (
        "name        n\n---------  --\na          10\nlong name   2"
    )
