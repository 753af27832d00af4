"""llama.cpp in a process of its own, for `llama_cpp.py`: one request a line in, one answer a line out, both JSON.

It runs in whatever Python has llama-cpp-python, and needs nothing else. A request has ids, max_new_tokens, eos_ids and
lookup (whether prompt lookup drafts). An answer has the produced ids; for each its time, in seconds after the request
was read, and the number of the forward that it came from; and for each forward the positions that it was given.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

# The script's own folder comes first on the path, and the script that starts this one has the library's name.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).resolve().parent]


class Watched:
    """A llama.cpp context, and the number of positions of every forward through it."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.widths: list[int] = []
        self._eval = llm.eval
        llm.eval = self._counted

    def _counted(self, tokens: Any) -> None:
        self.widths.append(len(tokens))
        self._eval(tokens)

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Decode greedily from an empty cache."""
        begin = time.perf_counter()
        self.widths.clear()
        self.llm.reset()
        ids: list[int] = []
        times: list[float] = []
        forwards: list[int] = []
        tokens = self.llm.generate(request["ids"], temp=0.0, repeat_penalty=1.0)
        for token in tokens:
            ids.append(int(token))
            times.append(time.perf_counter() - begin)
            forwards.append(len(self.widths) - 1)
            if len(ids) == request["max_new_tokens"] or ids[-1] in request["eos_ids"]:
                break
        tokens.close()
        return {"ids": ids, "times": times, "forwards": forwards, "widths": list(self.widths)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("gguf")
    parser.add_argument("--context", type=int, required=True, help="positions")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lookup-tokens", type=int, required=True, help="tokens that prompt lookup drafts")
    options = parser.parse_args()
    try:
        import llama_cpp
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
    except ImportError as error:
        print(json.dumps({"error": f"llama-cpp-python cannot be imported ({error})"}), flush=True)
        return 1
    shared: dict[str, Any] = {
        "model_path": options.gguf,
        "n_ctx": options.context,
        "n_threads": options.threads,
        "n_threads_batch": options.threads,
        "verbose": False,
    }
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=options.lookup_tokens)
    contexts = {
        False: Watched(llama_cpp.Llama(**shared)),
        True: Watched(llama_cpp.Llama(**shared, draft_model=lookup)),
    }
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(contexts[request["lookup"]].answer(request)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
