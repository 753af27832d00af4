"""What the page costs: a stream on time in a real browser, and an engine that hardly notices it.

    python bench/page_stream.py stream [--tokens 2000] [--rate 200] [--out FILE]
    python bench/page_stream.py engine [--repeats 3] [--out FILE]

`stream`: a scripted race (no models) writes TOKENS tokens, half of them in each lane, at RATE tokens a second, through
the page's own server into Chromium. Measured with the browser's own counters: when the last token was drawn against
when it was due, the longest task of the main thread after load, bytes on the wire at the beginning and at the end (the
rate is constant; how the bytes are cut into messages is the browser's affair), and the processor time that the browser
and the server took.

`engine`: the embedded pair, the same prompt, three ways in turn: on the command line; through the page's server with a
client that only drains the stream; through it with the page open in Chromium. Needs a machine with nothing else to do,
about three minutes of two cores. Besides: what the server takes of a processor while nobody asks for anything, which a
busy machine can tell as well.

The last line is everything as JSON. Exit code 1 where a bound is missed: total time within 5 %, no task over 100 ms, no
growth of the bytes as the text grows, less than 5 % of the engine's speed for the server's side.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LATE, LONGEST_TASK_MS, GROWTH, ENGINE_COST = 0.05, 100.0, 1.25, 0.05
"""The bounds. GROWTH: bytes in the last third of the stream's time over those in the first."""

PROMPT = "Write a Python function that returns the n-th Fibonacci number using a loop, and explain it step by step."
WARM_UP, IDLE_S = 16, 5.0
"""Tokens of the race before the measured one; how long the server is watched doing nothing."""

LANES = ("standard", "speculative")
WORDS = (" the", " model", " writes", " one", " token", ",", " 漢字", " naïve", "\n", " 👍", " again", ".")
DRAFT = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="part", required=True)
    stream = commands.add_parser("stream")
    stream.add_argument("--tokens", type=int, default=2000)
    stream.add_argument("--rate", type=float, default=200.0)
    engine = commands.add_parser("engine")
    engine.add_argument("--repeats", type=int, default=3)
    engine.add_argument("--max-new-tokens", type=int, default=128)
    for command in (stream, engine):
        command.add_argument("--out", type=Path)
    serve = commands.add_parser("serve")  # what `stream` starts as a process of its own
    serve.add_argument("--port", type=int, required=True)
    serve.add_argument("--tokens", type=int, required=True)
    serve.add_argument("--rate", type=float, required=True)
    options = parser.parse_args()
    if options.part == "serve":
        return serve_scripted(options.port, options.tokens, options.rate)
    if options.part == "stream":
        result, bounds = measure_stream(options.tokens, options.rate)
    else:
        result, bounds = measure_engine(options.repeats, options.max_new_tokens)
    document = {"environment": environment(), "part": options.part, **result, "bounds": bounds}
    for name, held in bounds.items():
        print(f"{'held  ' if held else 'MISSED'} {name}", file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if all(bounds.values()) else 1


def environment() -> dict[str, Any]:
    import torch

    from specdemo.environment import describe

    return describe(torch.device("cpu"))


# -- the scripted race -----------------------------------------------------------------------------------------


def serve_scripted(port: int, tokens: int, rate: float) -> int:
    """The page over a race that is told on time, until the process is ended."""
    from specdemo.ui import page

    blocks = page.build(ScriptedArena(tokens, rate))
    blocks.launch(server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, **page.launch_options())
    threading.Event().wait()
    return 0


class ScriptedArena:
    """Half of the tokens in each lane, every event when it is due; what is late is not waited for. It has no models and
    loads none."""

    pair, ran_out = None, False

    def __init__(self, tokens: int, rate: float) -> None:
        from specdemo.arena import Status

        self.status = Status("ready", "scripted")
        self._script = scripted(tokens, rate)

    def check(self, request: Any) -> None:
        """Anything may be asked for."""

    def start_switching(self, load: Any) -> None:
        """There is nothing to switch."""

    def cancel_loading(self) -> None:
        """Nor to cancel."""

    def stop(self, visitor: str = "") -> bool:
        return False

    def compare(self, request: Any, visitor: str = "") -> Iterator[Any]:
        return iter(())

    def race(self, request: Any, visitor: str = "") -> Iterator[Any]:
        began = time.monotonic()
        for due, event in self._script:
            time.sleep(max(0.0, began + due - time.monotonic()))
            yield event


def scripted(tokens: int, rate: float) -> list[tuple[float, Any]]:
    """(seconds after the start, event), with all that a real event carries."""
    from specdemo import events as e

    a_lane, lane_rate = tokens // 2, rate / 2
    top = tuple(e.Candidate(i, 0.5 / (i + 1), WORDS[i]) for i in range(5))
    timed: list[tuple[float, Any]] = []
    for lane in LANES:
        settings = {"max_new_tokens": a_lane, "temperature": 0.0}
        method = "standard" if lane == "standard" else "speculative"
        timed.append((0.0, e.Started(lane, 0.0, method, "scripted", "float32", "script", "cpu", settings, (1, 2, 3))))
        first = e.Committed(0, "Go", 0.5, 0.5, top)
        timed.append((1 / lane_rate, e.Prefilled(lane, 1 / lane_rate, 1 / lane_rate, 0.0, first)))
        written, number, text, ids = 1, 0, "Go", [0]
        while written < a_lane:
            number += 1
            drafts = 0 if lane == "standard" else min(DRAFT, a_lane - written - 1)
            kept = drafts if number % 2 else min(1, drafts)
            word = [WORDS[(written + i) % len(WORDS)] for i in range(drafts + 1)]
            drafted = tuple(e.DraftedToken(i, word[i], 0.5, 0.5, top) for i in range(drafts))
            fates: list[Any] = [
                "accepted" if i < kept else "rejected" if i == kept else "discarded" for i in range(drafts)
            ]
            judged = tuple(e.JudgedToken(i, word[i], fates[i], 0.5, 0.5, 0.5, 0.5, 0.25, top) for i in range(drafts))
            written += kept + 1
            t = written / lane_rate
            text += "".join(word[:kept]) + word[kept]
            ids += [*range(kept), 9]
            extra = e.Committed(9, word[kept], 0.5, 0.5, top)
            kind: Any = "bonus" if kept == drafts else "recovered"
            timed.append((t, e.Drafted(lane, t, number, drafted, 0.001, "model" if drafts else "none", drafts)))
            timed.append((t, e.Verified(lane, t, number, 0.001, 0.0001, judged, kept, extra, kind)))
        timed.append((written / lane_rate, e.Finished(lane, written / lane_rate, "length", tuple(ids), text)))
    return sorted(timed, key=lambda item: item[0])


# -- in the browser --------------------------------------------------------------------------------------------

WATCH = """
window.longest = 0;
new PerformanceObserver((list) => {
  const after = list.getEntries().filter((task) => window.began && task.startTime > window.began);
  window.longest = Math.max(window.longest, ...after.map((task) => task.duration));
}).observe({ type: "longtask", buffered: true });
"""
FOLLOW = """() => {
  window.updates = [];
  const read = specdemo.stage.read.bind(specdemo.stage);
  specdemo.stage.read = (log) => { read(log); updates.push([performance.now(), log.length]); };
  window.began = performance.now();
}"""


def measure_stream(tokens: int, rate: float) -> tuple[dict[str, Any], dict[str, bool]]:
    port = free_port()
    command = [sys.executable, __file__, "serve", "--port", str(port), "--tokens", str(tokens), "--rate", str(rate)]
    with running(command, port) as server, chromium() as (browser, browser_cpu):
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(600_000)
        tab.add_init_script(WATCH)
        tab.goto(f"http://127.0.0.1:{port}/")
        tab.wait_for_selector('.sd-status[data-state="ready"]')
        tab.wait_for_timeout(2000)
        tab.evaluate(FOLLOW)
        session = tab.context.new_cdp_session(tab)
        session.send("Performance.enable")
        session.send("Network.enable")
        received: list[tuple[float, int]] = []
        session.on("Network.dataReceived", lambda event: received.append((event["timestamp"], event["dataLength"])))
        before, cpu_before = counters(session), (cpu_seconds(server.pid), browser_cpu())
        tab.locator("#ask textarea").fill("scripted")
        tab.locator("#race-button").click()
        tab.wait_for_function("document.body.dataset.race === 'running'")
        tab.wait_for_function("document.body.dataset.race === 'idle'")
        after, cpu_after = counters(session), (cpu_seconds(server.pid), browser_cpu())
        updates = tab.evaluate("updates")
        longest = float(tab.evaluate("window.longest"))
        drawn = tab.locator(".sd-output .sd-token:not([aria-hidden])").count()
    began = next(at for at, length in updates if length > 1000)
    seconds = (updates[-1][0] - began) / 1000
    due = tokens / rate
    growth = growth_of(received, due)
    result = {
        "tokens": tokens,
        "rate": rate,
        "drawn_tokens": drawn,
        "due_s": due,
        "took_s": round(seconds, 3),
        "late": round(seconds / due - 1, 4),
        "updates": len(updates),
        "updates_per_second": round(len(updates) / seconds, 1),
        "longest_task_ms": round(longest, 1),
        "bytes": sum(size for _, size in received),
        "log_characters": updates[-1][1],
        "bytes_growth": round(growth, 3),
        "main_thread_share": round((after["TaskDuration"] - before["TaskDuration"]) / seconds, 3),
        "script_share": round((after["ScriptDuration"] - before["ScriptDuration"]) / seconds, 3),
        "layout_share": round((after["LayoutDuration"] - before["LayoutDuration"]) / seconds, 3),
        "server_cpu_share": round((cpu_after[0] - cpu_before[0]) / seconds, 3),
        "browser_cpu_share": round((cpu_after[1] - cpu_before[1]) / seconds, 3),
        "heap_mb": round(after["JSHeapUsedSize"] / 1e6, 1),
    }
    bounds = {
        f"the last token within {LATE:.0%} of when it was due": abs(seconds / due - 1) <= LATE,
        f"no task over {LONGEST_TASK_MS:.0f} ms": longest <= LONGEST_TASK_MS,
        "bytes do not grow with the text": growth <= GROWTH,
        "every token was drawn": drawn == 2 * (tokens // 2),
    }
    return result, bounds


def growth_of(received: list[tuple[float, int]], due: float) -> float:
    """Bytes in the last third of a stream of `due` seconds over those in the first, from (time, bytes) received. What
    comes after it, the last message, repeats the whole log once and does not count."""
    began = received[0][0]
    thirds = [0, 0, 0]
    for at, size in received:
        if at - began < due:
            thirds[int(3 * (at - began) / due)] += size
    return thirds[2] / thirds[0]


def counters(session: Any) -> dict[str, float]:
    return {metric["name"]: metric["value"] for metric in session.send("Performance.getMetrics")["metrics"]}


@contextmanager
def chromium() -> Iterator[tuple[Any, Any]]:
    """A browser, and a function that tells the processor seconds of all its processes."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    system = next((path for name in names if (path := shutil.which(name))), None)
    before = descendants(os.getpid())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=system, args=["--no-sandbox", "--disable-gpu"])
        yield browser, lambda: sum(cpu_seconds(pid) for pid in descendants(os.getpid()) - before)
        browser.close()


# -- the engine ------------------------------------------------------------------------------------------------


def measure_engine(repeats: int, tokens: int) -> tuple[dict[str, Any], dict[str, bool]]:
    """Tokens per second of both lanes, by way of running; medians over the repeats, the ways in turn."""
    port = free_port()
    speeds: dict[str, dict[str, list[float]]] = {
        way: {lane: [] for lane in LANES} for way in ("command line", "drained", "browser")
    }
    command = [sys.executable, str(ROOT / "app.py"), "--port", str(port)]
    browser_shares: list[float] = []
    idle_shares: list[float] = []
    for _ in range(repeats):
        for lane, speed in by_command_line(tokens).items():
            speeds["command line"][lane].append(speed)
        with running(command, port) as server:
            drain(port, WARM_UP)  # the first race pays for what happens once
            before, began = cpu_seconds(server.pid), time.monotonic()
            time.sleep(IDLE_S)
            idle_shares.append((cpu_seconds(server.pid) - before) / (time.monotonic() - began))
            for lane, speed in drain(port, tokens).items():
                speeds["drained"][lane].append(speed)
            with chromium() as (browser, browser_cpu):
                before, began = browser_cpu(), time.monotonic()
                for lane, speed in in_browser(browser, port, tokens).items():
                    speeds["browser"][lane].append(speed)
                browser_shares.append((browser_cpu() - before) / (time.monotonic() - began))
    medians = {way: {lane: round(median(values), 2) for lane, values in lanes.items()} for way, lanes in speeds.items()}
    base = medians["command line"]
    cost = {
        way: {lane: round(1 - medians[way][lane] / base[lane], 4) for lane in LANES} for way in ("drained", "browser")
    }
    result = {
        "prompt": PROMPT,
        "max_new_tokens": tokens,
        "repeats": repeats,
        "tokens_per_second": medians,
        "all_tokens_per_second": speeds,
        "cost": cost,
        "browser_cpu_share": round(median(browser_shares), 3),
        "idle_cpu_share": round(median(idle_shares), 4),
    }
    bounds = {
        f"the server's side costs the {lane} lane less than {ENGINE_COST:.0%}": cost["drained"][lane] < ENGINE_COST
        for lane in LANES
    }
    return result, bounds


def by_command_line(tokens: int) -> dict[str, float]:
    speeds = {}
    for lane in LANES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "run.jsonl"
            words = ["generate", "--prompt", PROMPT, "--method", lane, "--max-new-tokens", str(tokens), "--ignore-eos"]
            subprocess.run(
                [sys.executable, "-m", "specdemo", *words, "--trace", str(path)],
                check=True,
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            last = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
            speeds[lane] = float(last["metrics"]["tokens_per_second"])
    return speeds


def form(tokens: int) -> dict[str, Any]:
    from specdemo.ui.form import DEFAULTS

    return {**DEFAULTS, "prompt": PROMPT, "max_new_tokens": tokens, "ignore_eos": True}


def drain(port: int, tokens: int) -> dict[str, float]:
    """A race as the page asks for it, by a client that reads the stream and draws nothing."""
    base = f"http://127.0.0.1:{port}/"
    with urllib.request.urlopen(f"{base}config") as response:
        config = json.load(response)
    labels = {component["id"]: component["props"].get("elem_id") for component in config["components"]}
    race = next(
        dependency
        for dependency in config["dependencies"]
        if [labels.get(output) for output in dependency["outputs"]] == ["stage"] and len(dependency["inputs"]) > 5
    )
    values = form(tokens)
    session = uuid.uuid4().hex
    # the fields' order is the page's own: prompt first, then as the form shows them
    body = {
        "data": [values[name] for name in field_order(config, race)],
        "fn_index": race["id"],
        "session_hash": session,
    }
    request = urllib.request.Request(
        f"{base}gradio_api/queue/join", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request).close()
    log = ""
    with urllib.request.urlopen(f"{base}gradio_api/queue/data?session_hash={session}") as stream:
        for line in stream:
            if line.startswith(b"data: ") and b'"process_completed"' in line:
                log = json.loads(line[6:])["output"]["data"][0]
                break
    return speeds_of(log)


def field_order(config: dict[str, Any], race: dict[str, Any]) -> list[str]:
    """Names of the race's inputs, by the labels that the page gives them."""
    from specdemo.ui.assets import strings

    text = strings()
    names = {text[f"{name}_label"]: name for name in form(1)}
    by_id = {component["id"]: component["props"].get("label") for component in config["components"]}
    return [names[by_id[id]] for id in race["inputs"]]


def speeds_of(log: str) -> dict[str, float]:
    """Each lane's last speed in a log of the page."""
    records = [json.loads(line) for line in log.splitlines()]
    return {
        lane: [record["tps"] for record in records if record["k"] == "numbers" and record["l"] == index][-1]
        for index, lane in enumerate(LANES)
    }


def in_browser(browser: Any, port: int, tokens: int) -> dict[str, float]:
    from urllib.parse import urlencode

    query = urlencode({"prompt": PROMPT, "max_new_tokens": tokens, "ignore_eos": "true"})
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(600_000)
    tab.goto(f"http://127.0.0.1:{port}/?{query}")
    tab.wait_for_selector('.sd-status[data-state="ready"]')
    tab.wait_for_function("document.querySelector('#ask textarea').value.length > 0")
    tab.locator("#race-button").click()
    tab.wait_for_function("document.body.dataset.race === 'running'")
    tab.wait_for_function("document.body.dataset.race === 'idle'")
    shown = {lane: float(tab.locator(f'[data-score="{lane}"] .sd-speed-value').inner_text()) for lane in LANES}
    tab.close()
    return shown


# -- processes -------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(command: list[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A server on `port`, ended afterwards. Raises RuntimeError where it does not come up."""
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1200):
            if server.poll() is not None:
                raise RuntimeError(f"The server ended at once with code {server.returncode}.")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/config", timeout=10).close()
                break
            except OSError:
                time.sleep(0.25)
        else:
            raise RuntimeError("The server did not come up.")
        yield server
    finally:
        server.terminate()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far; 0 where it is gone. Linux."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> set[int]:
    """Ids of all processes that a process has started, directly or not. Linux."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            children.setdefault(parent, []).append(int(folder.name))
    found, waiting = set(), [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found


if __name__ == "__main__":
    sys.exit(main())
