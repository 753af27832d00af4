"""What strangers do to a public page, all of it here: a server of its own, asked over the loopback, and by itself over
within six minutes.

    python -m bench.load                          everything, on a tiny model with random weights
    python -m bench.load --parts crowd,cycles     some of it
    python -m bench.load --target embedded        on the embedded pair

crowd       many visitors at once, by gradio_client and by plain HTTP: a full result or a clear refusal for each
cycles      start, stop, close the connection, again and again; then the next run starts at once
memory      short runs of ever new visitors: the server does not grow
hostile     everything that no page would send, to every endpoint: no crash, no trace, and the next run is fine
killed      SIGKILL while a run is under way: nothing is left behind, and the server starts again
conversion  SIGKILL while the embedded model is converted: no half of it is taken for the whole

Prints a line for each part, and as the last line all of it as JSON. The exit code is 1 where something did not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from specdemo.ui.assets import strings

ROOT = Path(__file__).parents[1]
SECRET = "prompt-that-no-log-may-hold"
PATIENCE_S = 240.0
"""Nobody waits longer; whoever would have to, hangs."""

GROWTH = 0.05
"""More than this share of the memory is growth."""

REFUSALS = ("line is full", "in line already", "Queue is full", "Too many connections")
"""What a visitor for whom there is no room may be told."""

ENDS = ("process_completed", "unexpected_error", "close_stream")
"""Nothing of interest follows one of these messages."""

HOSTILE: tuple[Any, ...] = (
    None,
    [],
    {"a": {"b": [1]}},
    True,
    -1,
    -(10**30),
    10**300,
    1e308,
    "",
    "\x00\x01\x1b[31m\u202e",
    "<script>alert(1)</script>{{7*7}}${7*7}",
    "../../../../etc/passwd",
    "someone/../../model",
    "\U0001f4a5" * 1000,
    "x" * 1_000_000,
    [[[[[[[[[[]]]]]]]]]],
)

PATHS = (
    "/gradio_api/file=/etc/passwd",
    "/gradio_api/file=../../../etc/passwd",
    "/gradio_api/proxy=http://127.0.0.1:1/",
    "/gradio_api/upload",
    "/gradio_api/upload_progress?upload_id=x",
    "/gradio_api/component_server",
    "/gradio_api/process_recording",
    "/gradio_api/vibe-edit",
    "/gradio_api/runs",
    "/gradio_api/mcp/sse",
    "/gradio_api/stream/a/1/2/playlist.m3u8",
    "/gradio_api/dev/reload",
    "/gradio_api/openapi.json",
    "/monitoring",
    "/monitoring/summary",
    "/docs",
    "/redoc",
    "/openapi.json",
    "/static/../../../../etc/passwd",
    "/assets/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
    "/gradio_api/run/nothing",
    "/gradio_api/call/nothing",
    "/gradio_api/call/v2/nothing",
)
"""Routes that are shut or have nothing behind them; each is asked by GET and by POST."""


class Server:
    """`app.py` in a process of its own."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = arguments
        self._log = log
        self.start()

    def start(self) -> None:
        """Returns when races can run."""
        command = [sys.executable, str(ROOT / "app.py"), "--public", "--port", str(self.port), *self._arguments]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        until = time.monotonic() + PATIENCE_S
        while self.health() != "ready":
            if self.process.poll() is not None or time.monotonic() > until or self.health() == "broken":
                raise RuntimeError(f"The server does not start: {self.written()[-2000:]}")
            time.sleep(0.2)

    def health(self) -> str:
        try:
            return str(httpx.get(f"{self.url}/healthz", timeout=5).json()["state"])
        except httpx.HTTPError:
            return "gone"

    def memory(self) -> int:
        """Resident bytes, those of helper processes included."""
        main = psutil.Process(self.process.pid)
        return sum(process.memory_info().rss for process in [main, *main.children(recursive=True)])

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to the server alone; the helpers that it had."""
        helpers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        return helpers

    def stop(self) -> float:
        """SIGTERM; how long it took to end."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=30)
        return time.monotonic() - began

    def written(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


class Page:
    """What a browser knows of the page: its endpoints, and what it sends to them."""

    def __init__(self, url: str) -> None:
        self.url = url
        config = httpx.get(f"{url}/config", timeout=60).json()
        self.components = {component["id"]: component["props"] for component in config["components"]}
        self.endpoints = [endpoint for endpoint in config["dependencies"] if endpoint["backend_fn"]]
        self.race, self.stop = self._pressed("race-button"), self._pressed("stop-button")

    def _pressed(self, elem_id: str) -> dict[str, Any]:
        (button,) = [id for id, props in self.components.items() if props.get("elem_id") == elem_id]
        (endpoint,) = [
            one for one in self.endpoints if [button, "click"] in [list(target) for target in one["targets"]]
        ]
        return dict(endpoint)

    def form(self, prompt: str, tokens: int) -> list[Any]:
        """The values of the form's fields, in the order in which a race takes them."""
        props = [self.components[id] for id in self.race["inputs"]]
        values = [field.get("value") for field in props]
        budget = next(
            index for index, field in enumerate(props) if field.get("label") == strings()["max_new_tokens_label"]
        )
        values[0], values[budget] = prompt, tokens
        return values


class Visitor:
    """One browser tab, as far as the network sees it."""

    def __init__(self, page: Page, number: int = 0) -> None:
        self.page = page
        self.session = uuid.uuid4().hex
        # the server trusts the loopback as it would a proxy, so that each visitor comes from an address of its own
        headers = {"X-Forwarded-For": f"198.18.{number // 250}.{number % 250 + 1}"}
        self.http = httpx.Client(base_url=page.url, headers=headers, timeout=PATIENCE_S)

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def join(self, endpoint: Mapping[str, Any], data: Any) -> httpx.Response:
        body = {"data": data, "fn_index": endpoint["id"], "session_hash": self.session, "trigger_id": None}
        return self.http.post("/gradio_api/queue/join", content=json.dumps(body), headers=_JSON)

    def now(self, endpoint: Mapping[str, Any], data: Any) -> httpx.Response:
        """An event that does not line up."""
        body = {"data": data, "fn_index": endpoint["id"], "session_hash": self.session}
        return self.http.post("/gradio_api/run/predict", content=json.dumps(body), headers=_JSON)

    def messages(self) -> Iterator[dict[str, Any]]:
        """What the queue tells, to its end."""
        params = {"session_hash": self.session}
        with self.http.stream("GET", "/gradio_api/queue/data", params=params) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:"):
                    yield json.loads(line[5:])

    def race(self, prompt: str = "one two three", tokens: int = 8) -> str:
        """A whole race: "result", the refusal, or "failed: ..."."""
        joined = self.join(self.page.race, self.page.form(prompt, tokens))
        if joined.status_code != 200:
            return outcome_of(joined.text)
        told = ""
        for message in self.messages():
            told += " ".join(strings_in(message))
            if message["msg"] in ENDS:
                break
        return outcome_of(told)


_JSON = {"content-type": "application/json"}


def strings_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from strings_in(item)


def outcome_of(told: str) -> str:
    """What a visitor got, by all that the server said."""
    if '"k":"done","ok":true' in told:
        return "result"
    for refusal in REFUSALS:
        if refusal in told:
            return f"refused: {refusal}"
    return f"failed: {told[-200:]}"


@dataclass
class Size:
    """How much of everything."""

    clients: int = 20
    visitors: int = 80
    cycles: int = 200
    runs: int = 300
    hostile: tuple[Any, ...] = HOSTILE


SHORT = Size(clients=2, visitors=26, cycles=5, runs=20, hostile=HOSTILE[4:8])
"""For the tests: enough visitors to fill the line."""

Found = dict[str, Any]


def crowd(server: Server, page: Page, size: Size) -> Found:
    """More visitors at once than the line has room for."""
    from gradio_client import Client

    number = size.clients + size.visitors
    go = threading.Barrier(number)
    clients = [
        Client(
            server.url,
            verbose=False,
            headers={"X-Forwarded-For": f"198.19.0.{index + 1}"},
            httpx_kwargs={"timeout": PATIENCE_S},  # its own patience ends after five seconds
        )
        for index in range(size.clients)
    ]
    waits: list[float] = []

    def visit(index: int) -> str:
        go.wait()
        began = time.monotonic()
        try:
            if index < size.clients:
                return _called(clients[index])
            with Visitor(page, index) as visitor:
                return visitor.race()
        except Exception as error:
            return f"failed: {type(error).__name__}: {error}"[:200]
        finally:
            waits.append(time.monotonic() - began)

    with ThreadPoolExecutor(number) as pool:
        outcomes = Counter(pool.map(visit, range(number)))
    for client in clients:
        client.close()
    results = outcomes["result"]
    refused = sum(count for outcome, count in outcomes.items() if outcome.startswith("refused"))
    return {
        "visitors": number,
        "results": results,
        "refused": refused,
        "others": {outcome: count for outcome, count in outcomes.items() if outcome.startswith("failed")},
        "longest_wait_s": round(max(waits), 1),
        "ok": results + refused == number and results > 0 and refused > 0,
    }


def _called(client: Any) -> str:
    try:
        result = client.predict(prompt="one two three", max_new_tokens=8, api_name="/race")
    except Exception as error:
        return outcome_of(str(error)) if not isinstance(error, httpx.HTTPStatusError) else _status(error)
    reasons = {result[lane]["finish_reason"] for lane in ("standard", "speculative")}
    return "result" if reasons <= {"length", "eos", "stop"} else f"failed: {reasons}"


def _status(error: httpx.HTTPStatusError) -> str:
    full = error.response.status_code == 503
    return "refused: Queue is full" if full else f"failed: status {error.response.status_code}"


def cycles(server: Server, page: Page, size: Size) -> Found:
    """Start, stop, close."""
    for number in range(size.cycles):
        with Visitor(page, number) as visitor:
            visitor.join(page.race, page.form("one two three", 256)).raise_for_status()
            for message in visitor.messages():
                if message["msg"] in ("process_generating", "process_completed"):
                    break  # and the connection with it
            visitor.now(page.stop, []).raise_for_status()
    began = time.monotonic()
    with Visitor(page) as visitor:
        visitor.join(page.race, page.form("one two three", 8)).raise_for_status()
        first = next(message for message in visitor.messages() if "generating" in message["msg"])
    started = time.monotonic() - began
    with Visitor(page) as visitor:
        after = visitor.race()
    return {
        "cycles": size.cycles,
        "next_starts_s": round(started, 3),
        "next": after,
        "ok": after == "result" and started < 5.0 and bool(first),
    }


def memory(server: Server, page: Page, size: Size) -> Found:
    """Resident memory over many short runs, each of a new visitor."""
    sizes, outcomes = [], Counter[str]()
    for number in range(size.runs):
        with Visitor(page, number) as visitor:
            outcomes[visitor.race()] += 1
        sizes.append(server.memory())
    fifth = max(1, size.runs // 5)
    early, late = statistics.median(sizes[fifth : 2 * fifth]), statistics.median(sizes[-fifth:])
    return {
        "runs": size.runs,
        "outcomes": dict(outcomes),
        "early_mib": round(early / 2**20, 1),
        "late_mib": round(late / 2**20, 1),
        "growth": round(late / early - 1, 4),
        "ok": late / early - 1 < GROWTH and outcomes["result"] == size.runs,
    }


def hostile(server: Server, page: Page, size: Size) -> Found:
    """Every endpoint of the page and of Gradio, with values of every wrong kind."""
    sent, traces, lost = Counter[str](), [], []

    def told(name: str, text: str) -> None:
        sent[name] += 1
        if "Traceback" in text or "site-packages" in text or "root:x:" in text:
            traces.append(f"{name}: {text[:200]}")

    def attack(endpoint: Mapping[str, Any], data: Any) -> None:
        name = str(endpoint["api_name"])
        with Visitor(page, 7) as visitor:
            visitor.http.timeout = httpx.Timeout(60)
            try:
                told(name, visitor.now(endpoint, data).text)
                joined = visitor.join(endpoint, data)
                told(name, joined.text)
                if joined.status_code == 200:
                    for message in visitor.messages():
                        told(name, " ".join(strings_in(message)))
                        if message["msg"] in ENDS:
                            break
            except httpx.TransportError as error:
                lost.append(f"{name} {json.dumps(data)[:40]}: {type(error).__name__}")

    attacks = [(one, data) for one in page.endpoints for data in _data(page, one, size.hostile)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda pair: attack(*pair), attacks))
    with Visitor(page) as visitor:
        for path in PATHS:
            for method in ("GET", "POST"):
                with suppress(httpx.RemoteProtocolError):  # Gradio breaks off the stream of a run that does not exist
                    told(path, visitor.http.request(method, path, content=b"{}").text)
        for body in (b"", b"[", b"null", b'{"fn_index": "x"}', b'{"data": 1}', b'{"data": [], "fn_index": 10000}'):
            told("join", visitor.http.post("/gradio_api/queue/join", content=body, headers=_JSON).text)
        large = visitor.join(page.race, page.form("x" * 10_000_000, 8)).status_code
        chunked = visitor.http.post("/gradio_api/queue/join", content=iter([b"{}"]), headers=_JSON).status_code
    with Visitor(page) as visitor:
        after = visitor.race(SECRET)
    opened = [path for path in PATHS[:-3] for answer in [httpx.get(page.url + path)] if answer.status_code == 200]
    return {
        "endpoints": len(page.endpoints),
        "requests": sum(sent.values()),
        "traces": traces[:5],
        "no_answer": lost[:5],
        "ten_megabytes": large,
        "without_length": chunked,
        "opened": opened,
        "next": after,
        "ok": not traces and not lost and not opened and large == 413 and chunked == 411 and after == "result",
    }


def _data(page: Page, endpoint: Mapping[str, Any], values: Sequence[Any]) -> Iterator[Any]:
    """Data that fits in number and not in kind, and some that does not fit at all."""
    number = len(endpoint["inputs"])
    for value in values if number else ():
        yield [value] * number
    if endpoint["id"] == page.race["id"]:
        for value in values:
            form = page.form("a prompt", 8)
            yield [value, *form[1:]]
            yield [form[0], *form[1:3], value, *form[4:]]
    yield [0] * (number + 3)
    yield []


def killed(server: Server, page: Page, size: Size) -> Found:
    """The server dies in a run, and is started again."""
    with Visitor(page) as visitor:
        visitor.join(page.race, page.form("one two three", 256)).raise_for_status()
        next(message for message in visitor.messages() if "generating" in message["msg"])
        helpers = server.kill()
    time.sleep(3.0)
    left = [helper.pid for helper in helpers if helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE]
    began = time.monotonic()
    server.start()
    ready = time.monotonic() - began
    with Visitor(Page(server.url)) as visitor:
        after = visitor.race()
    return {
        "helpers": len(helpers),
        "left": len(left),
        "ready_s": round(ready, 1),
        "next": after,
        "ok": after == "result" and not left,
    }


def conversion(server: Server, page: Page, size: Size) -> Found:
    """The embedded model's conversion dies half way, and is made again."""
    from specdemo.models.embedded import SMOLLM2_135M

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder)
        environment = os.environ | {"SPECDEMO_CACHE": folder}
        command = [sys.executable, "-m", "specdemo.models.embedded"]
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
        ) as one:
            assert one.stderr is not None
            for line in one.stderr:
                if line.startswith(b"Converting"):
                    break
            time.sleep(0.5)
            one.kill()
        whole = (cache / SMOLLM2_135M.folder).exists()
        again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
        left = [path.name for path in cache.iterdir() if path.suffix == ".partial"]
        made = (cache / SMOLLM2_135M.folder / "manifest.json").is_file()
    return {"taken_for_whole": whole, "left": left, "ok": not whole and again.returncode == 0 and made and not left}


Part = Callable[[Server, Page, Size], Found]
PARTS: Mapping[str, Part] = {part.__name__: part for part in (crowd, cycles, memory, hostile, killed, conversion)}


def tiny_models(folder: Path) -> list[str]:
    """A target and a draft model with random weights; the options that name them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sys.path.insert(0, str(ROOT / "tests"))
    from tiny_folders import save_folder

    options = []
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        options += [f"--{name}", str(save_folder(LlamaForCausalLM(config), folder / name))]
    return [*options, "--dtype", "float32", "--device", "cpu"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, by name (default: all)")
    parser.add_argument("--target", help="the server's --target (default: a tiny model with random weights)")
    parser.add_argument("--short", action="store_true", help="few of everything, for the tests")
    parser.add_argument("--out", type=Path, help="also write the JSON here; parts that the file has already are kept")
    options = parser.parse_args(arguments)
    names = options.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: choose from {', '.join(PARTS)}")
    size = SHORT if options.short else Size()
    began = time.monotonic()
    found: Found = {"model": options.target or "tiny, random weights", "parts": {}}
    with tempfile.TemporaryDirectory() as folder:
        models = ["--target", options.target] if options.target else tiny_models(Path(folder))
        server = Server(models, Path(folder) / "server.log")
        try:
            for name in names:
                found["parts"][name] = part = _timed(PARTS[name], server, size)
                print(f"{name}: {'held' if part['ok'] else 'FAILED'} {json.dumps(part)}", flush=True)
            found["sigterm_s"] = round(server.stop(), 2)
        finally:
            server.process.kill()
            server.process.wait()
        written = server.written()
    found["prompt_in_log"] = SECRET in written
    found["log_lines"] = sum(line.startswith('{"at"') for line in written.splitlines())
    found["seconds"] = round(time.monotonic() - began, 1)
    found["environment"] = _environment()
    good = all(part["ok"] for part in found["parts"].values()) and not found["prompt_in_log"] and found["sigterm_s"] < 5
    found["ok"] = good
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        before = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {"parts": {}}
        parts = {**before["parts"], **found["parts"]}
        whole = {**found, "parts": parts, "ok": good and all(part["ok"] for part in parts.values())}
        options.out.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found))
    return 0 if good else 1


def _timed(part: Part, server: Server, size: Size) -> Found:
    began = time.monotonic()
    try:
        found = part(server, Page(server.url), size)
    except Exception as error:
        found = {"ok": False, "error": f"{type(error).__name__}: {error}"[:500]}
    load = round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
    return {**found, "seconds": round(time.monotonic() - began, 1), "load_average": load}


def _environment() -> dict[str, Any]:
    import torch

    from specdemo.environment import describe

    return describe(torch.device("cpu"))


if __name__ == "__main__":
    sys.exit(main())
