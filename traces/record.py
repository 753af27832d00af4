"""Record the race that the page shows before any model is loaded: `python traces/record.py`.

Races the embedded pair once through the arena and writes, beside this file, the events of both lanes in the order in
which they came (`first-race.jsonl`) and what they were recorded with (`first-race.json`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from specdemo import environment, trace  # noqa: E402
from specdemo.arena import Arena, RaceRequest  # noqa: E402
from specdemo.models.loading import load_pair  # noqa: E402
from specdemo.settings import Settings  # noqa: E402

PROMPT = "Write a Python function that returns the n-th Fibonacci number using a loop."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--method", default="speculative")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()

    pair = load_pair(dtype=options.dtype)
    arena = Arena(lambda progress: pair)
    arena.load()
    settings = Settings(draft_length=options.draft_length, max_new_tokens=options.max_new_tokens)
    events = list(arena.race(RaceRequest(options.prompt, settings, options.method)))
    trace.write(options.out / "first-race.jsonl", events)
    machine = environment.describe(pair.target.device)
    about = {"prompt": options.prompt, **{name: machine[name] for name in ("date", "processor", "cores", "torch")}}
    (options.out / "first-race.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
