"""`python -m specdemo serve-plan`: the commands that bring up both servers, and the line that races them.

The arithmetic is the memory plan's: weights and caches by precision. Both servers get the same cards, split and
precision, else the race would compare those. Tried in order: 16 bit, 8 bit, 4 bit, each on the fewest cards of one node
and then on more nodes; the first under which both servers have room at the same time is taken.

vLLM's options are those of 0.32, as its own parser reads them; llama.cpp's are those of its documentation. No weight is
loaded or fetched.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..errors import BadRequest
from ..plan.choose import gib
from ..plan.devices import machine_of
from ..plan.shape import ModelShape
from ..plan.sizes import GIB, Kept, kv_bytes, weight_bytes

UTILIZATION = 0.90
"""Share of a card that a server may take, vLLM's own default."""

OVERHEAD = 2 * GIB
"""Of each card, besides weights and caches: activations, recorded graphs, the libraries' work space."""

NGRAM = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
PORT = 8001
_GPUS = re.compile(r"(\d+)\s*x\s*(\S+)", re.IGNORECASE)

PRECISIONS = (("bfloat16", ""), ("fp8", "fp8"), ("nf4", "bitsandbytes"))
"""Precision -> vLLM's `--quantization`, empty for none. Both quantize a 16-bit model while they load it."""

TITLES = {"bfloat16": "16 bit", "fp8": "8 bit (fp8)", "nf4": "4 bit (NF4)"}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Cards of one size: so many in each of so many nodes."""

    cards: int
    size: int
    nodes: int = 1

    @property
    def room(self) -> int:
        """Bytes of a card for weights and caches."""
        return int(self.size * UTILIZATION) - OVERHEAD


@dataclass(frozen=True, slots=True)
class Wanted:
    """`drafter` is draft, ngram or eagle; `sequences`: requests that a server decodes at once, each with a cache of
    `context` positions."""

    drafter: str = "draft"
    head: str | None = None
    draft_length: int = 5
    context: int = 8192
    sequences: int = 16


@dataclass(frozen=True, slots=True)
class Split:
    """One server's place. `tensor` cards share each layer, `pipeline` groups of them share the layers; `bytes`: what
    the speculative server needs in all."""

    precision: str
    tensor: int
    pipeline: int
    bytes: int

    @property
    def cards(self) -> int:
        return self.tensor * self.pipeline


def cluster_of(gpus: str, nodes: int = 1) -> Cluster:
    """The cluster that `--gpus` and `--nodes` describe, as 8x80GiB. Raises BadRequest."""
    match = _GPUS.fullmatch(gpus.strip())
    if match is None or int(match[1]) < 1:
        raise BadRequest(f"{gpus!r} names no cards: write them like 8x80GiB, eight of 80 GiB in each node.")
    if nodes < 1:
        raise BadRequest("--nodes is a whole number from 1 on.")
    cluster = Cluster(int(match[1]), machine_of(match[2]).devices[0].total, nodes)
    if cluster.room <= 0:
        raise BadRequest(f"A card of {match[2]} has no room for a model: {gib(OVERHEAD)} of it are needed besides.")
    return cluster


def split_for(cluster: Cluster, target: ModelShape, draft: ModelShape | None, wanted: Wanted) -> Split:
    """The first split under which both servers have room. Raises BadRequest with what would be needed."""
    least = None
    for split in _splits(cluster, target, draft, wanted):
        if split.bytes <= split.cards * cluster.room:
            if 2 * split.cards <= cluster.cards * cluster.nodes:
                return split
            least = least or split
    total = cluster.cards * cluster.nodes
    if least is not None:
        raise BadRequest(
            f"{target.name} fits on {least.cards} of these cards in {TITLES[least.precision]}, and two servers need "
            f"{2 * least.cards} of them, where there are {total}: ask for fewer --sequences or a shorter --context."
        )
    need = min(split.bytes for split in _splits(cluster, target, draft, wanted))
    raise BadRequest(
        f"{target.name} does not fit: a server needs {gib(need)} at the least, and {total} cards can give "
        f"{gib(total * cluster.room)} to both."
    )


def _splits(cluster: Cluster, target: ModelShape, draft: ModelShape | None, wanted: Wanted) -> Iterator[Split]:
    tensors = [n for n in (1, 2, 4, 8, 16, 32) if n <= cluster.cards and target.heads % n == 0]
    for precision, _ in PRECISIONS:
        need = server_bytes(target, draft, precision, wanted)
        for tensor in tensors:
            yield Split(precision, tensor, 1, need)
        for nodes in range(2, cluster.nodes + 1):
            yield Split(precision, tensors[-1], nodes, need)


def server_bytes(target: ModelShape, draft: ModelShape | None, precision: str, wanted: Wanted) -> int:
    """Weights and caches of the speculative server. The draft model stays in 16 bit."""
    half = Kept("bfloat16", "transformers", "bfloat16", "cuda")
    kept = {
        "bfloat16": half,
        "fp8": Kept("int8", "bitsandbytes", "bfloat16", "cuda"),  # a byte for a weight, too
        "nf4": Kept("nf4", "bitsandbytes", "bfloat16", "cuda"),
    }[precision]
    total = weight_bytes(target, kept) + wanted.sequences * kv_bytes(target, half, wanted.context)
    if draft is not None and wanted.drafter == "draft":
        total += weight_bytes(draft, half) + wanted.sequences * kv_bytes(draft, half, wanted.context)
    return total


# -- commands ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Command:
    """One line for a shell, and what it is."""

    about: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def vllm_commands(
    cluster: Cluster, split: Split, target: ModelShape, draft: ModelShape | None, wanted: Wanted
) -> list[Command]:
    """Both servers, a line for every node that each of them spans."""
    commands: list[Command] = []
    for index, lane in enumerate(("standard", "speculative")):
        words = ["vllm", "serve", target.name, "--host", _host(cluster), "--port", str(PORT + index)]
        words += ["--served-model-name", _short(target.name), "--max-model-len", str(wanted.context)]
        words += ["--max-num-seqs", str(wanted.sequences), "--gpu-memory-utilization", f"{UTILIZATION:.2f}"]
        if split.tensor > 1:
            words += ["--tensor-parallel-size", str(split.tensor)]
        if split.pipeline > 1:
            words += ["--pipeline-parallel-size", str(split.pipeline)]
        if quantization := dict(PRECISIONS)[split.precision]:
            words += ["--quantization", quantization]
        if lane == "speculative":
            words += ["--speculative-config", json.dumps(_vllm_drafter(split, draft, wanted))]
            words += ["--per-request-spec-decode-metrics", "detailed"]
        commands += _placed(cluster, split, lane, index, words)
    return commands


def _vllm_drafter(split: Split, draft: ModelShape | None, wanted: Wanted) -> dict[str, object]:
    length = {"num_speculative_tokens": wanted.draft_length}
    if wanted.drafter == "eagle":
        return {"method": "eagle3", "model": wanted.head, **length}
    if wanted.drafter == "ngram" or draft is None:
        return {"method": "ngram", **length, **NGRAM}
    tensor = split.tensor if draft.heads % split.tensor == 0 else 1
    sharing = {"draft_tensor_parallel_size": tensor} if split.tensor > 1 else {}
    return {"method": "draft_model", "model": draft.name, **length, **sharing}


def _placed(cluster: Cluster, split: Split, lane: str, index: int, words: list[str]) -> Iterator[Command]:
    """The command on the cards that are its own."""
    if split.pipeline == 1:
        a_node = cluster.cards // split.tensor
        node, place = (0, index) if a_node > 1 else (index, 0)
        first = place * split.tensor
        cards = ",".join(str(card) for card in range(first, first + split.tensor))
        where = f"{lane} server, on node {node}" if cluster.nodes > 1 else f"{lane} server"
        shown = [f"CUDA_VISIBLE_DEVICES={cards}"] if split.tensor < cluster.cards else []
        yield Command(where, (*shown, *words))
        return
    first_node = index * split.pipeline
    for rank in range(split.pipeline):
        several = ["--nnodes", str(split.pipeline), "--node-rank", str(rank), "--master-addr", f"NODE{first_node}"]
        headless = ["--headless"] if rank else []
        yield Command(f"{lane} server, on node {first_node + rank}", (*words, *several, *headless))


def llama_commands(split: Split, target: ModelShape, draft: ModelShape | None, wanted: Wanted) -> list[Command]:
    """One server for both lanes: it takes the draft length with each request, 0 for the standard lane."""
    words = ["llama-server", "--model", f"{_short(target.name)}.gguf", "--host", "127.0.0.1", "--port", str(PORT)]
    words += ["--ctx-size", str(wanted.context * wanted.sequences), "--parallel", str(wanted.sequences)]
    words += ["--n-gpu-layers", "999"]
    if split.cards > 1:
        words += ["--split-mode", "row"]
    if draft is not None and wanted.drafter == "draft":
        words += ["--spec-type", "draft-simple", "--spec-draft-model", f"{_short(draft.name)}.gguf"]
        words += ["--spec-draft-n-max", str(wanted.draft_length)]
    else:
        words += ["--spec-type", "ngram-simple"]
    return [Command("both lanes", tuple(words))]


def joining(engine: str, cluster: Cluster, split: Split, target: ModelShape) -> Command:
    """The line that races them, from any machine that reaches them."""
    hosts = ["127.0.0.1", "127.0.0.1"] if cluster.nodes == 1 else ["NODE0", "NODE0"]
    if engine == "vllm" and cluster.nodes > 1:
        if split.pipeline > 1:
            hosts[1] = f"NODE{split.pipeline}"
        elif cluster.cards // split.tensor < 2:
            hosts[1] = "NODE1"
    ports = (PORT, PORT + 1) if engine == "vllm" else (PORT, PORT)
    served = f"standard=http://{hosts[0]}:{ports[0]},speculative=http://{hosts[1]}:{ports[1]}"
    model = ["--model", _short(target.name)] if engine == "vllm" else []
    return Command("the page", ("python", "app.py", "--served", served, *model))


def _host(cluster: Cluster) -> str:
    """Where a server listens: on one box to that box alone."""
    return "127.0.0.1" if cluster.nodes == 1 else "0.0.0.0"


def _short(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1]


def plan(
    engine: str, cluster: Cluster, target: ModelShape, draft: ModelShape | None, wanted: Wanted
) -> tuple[Split, list[Command], list[str]]:
    """The split, the commands in the order in which they are given, and what must be known about them. Raises
    BadRequest."""
    notes = []
    if wanted.drafter == "eagle" and not wanted.head:
        raise BadRequest("--drafter eagle needs the head that was trained for the target: name it with --head.")
    if engine == "llama.cpp" and wanted.drafter == "eagle":
        raise BadRequest("Heads are planned for vLLM only: choose --engine vllm, or another drafter.")
    if draft is None and wanted.drafter == "draft":
        wanted = replace(wanted, drafter="ngram")
        notes.append("There is no draft model, so the speculative server looks its drafts up in the text (n-gram).")
    if engine == "llama.cpp":
        if cluster.nodes > 1:
            raise BadRequest("llama.cpp's server is planned on one node: leave out --nodes, or choose --engine vllm.")
        doubled = replace(cluster, cards=2 * cluster.cards)  # one server, so all cards are its own
        split = split_for(doubled, target, draft, wanted)
        commands = llama_commands(split, target, draft, wanted)
        notes.append("The model's file in GGUF decides the precision. These options were not tried here.")
    else:
        split = split_for(cluster, target, draft, wanted)
        commands = vllm_commands(cluster, split, target, draft, wanted)
        if split.precision != "bfloat16":
            notes.append("The target is quantized while it loads; a checkpoint made so beforehand starts faster.")
        if split.pipeline > 1:
            notes.append("Speculation over several nodes was not tried here: start the speculative server first.")
    return split, [*commands, joining(engine, cluster, split, target)], notes
