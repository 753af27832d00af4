"""What a card gives: one command, under eight minutes, with torch and transformers only and without a network.

    python bench/gpu_check.py [--out FILE] [--embedded FOLDER]

Random-weight Llamas of real shapes (8B target, 1B draft, bfloat16) stand in for trained models: speed does not depend
on what weights say. Without CUDA, or with --tiny, the shapes are tiny and only show that everything runs. The parts,
those that matter most first:

copy            copy bandwidth, and the floor it sets: every weight read once a token
graphs          the recorded (CUDA graph) forward against the eager one
standard        standard decoding against the floor
round           a round against T_verify + K * T_draft
acceptance      speed at a given acceptance: a scripted drafter that spends the real draft's time
race            both lanes through the arena: the embedded pair if its folder is there, else tiny models
nf4, int8       what verifying costs with 4-bit and 8-bit weights, where bitsandbytes is installed
generate        standard against transformers' `generate`, eager
compiled        the same with a compiled static cache

Each part prints what it found in a line as soon as it knows. A part that fails, or for which there is no time or no
library, says so in a sentence, and the others go on. The last line is everything as JSON; --out writes it to a file
after every part, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from specdemo.arena import Arena, RaceRequest
from specdemo.drafters.base import Drafter, Proposal
from specdemo.drafters.draft_model import DraftModel
from specdemo.engines.job import Job
from specdemo.engines.speculative import speculative
from specdemo.engines.standard import standard
from specdemo.environment import describe
from specdemo.events import Event, Failed, Finished
from specdemo.metrics import Metrics, fold
from specdemo.models.base import LanguageModel
from specdemo.models.cache_folder import cache_folder
from specdemo.models.lean import LeanLM
from specdemo.models.loading import Pair, load_pair
from specdemo.models.pretrained import transformers_config
from specdemo.models.quantize import bitsandbytes_obstacle, card_obstacle, load_quantized
from specdemo.models.reduced_vocab import SHIPPED
from specdemo.sampling import Purpose, uniform
from specdemo.settings import Settings
from specdemo.text import TokenText

LIMIT_S = 480.0
NEW_TOKENS, TINY_TOKENS = 256, 24
DRAFT_LENGTH = 5
PROMPT_TOKENS = 128
WRONG = 1  # added to the right id

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TARGET_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
DRAFT_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
TARGET_TINY = {
    "vocab_size": 320,
    "hidden_size": 192,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
DRAFT_TINY = TARGET_TINY | {"num_hidden_layers": 1, "tie_word_embeddings": True}


@dataclass
class Check:
    """Where the run stands: its device and shapes, its deadline, the models (made when first asked for) and what was
    found so far."""

    device: torch.device
    tiny: bool
    new_tokens: int
    deadline: float
    embedded: Path
    out: Path | None
    found: dict[str, Any] = field(default_factory=dict)
    text: TokenText = field(default_factory=lambda: TokenText(byte_tokenizer()))

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def target_shape(self) -> dict[str, Any]:
        return TARGET_TINY if self.tiny else TARGET_8B

    @property
    def draft_shape(self) -> dict[str, Any]:
        return DRAFT_TINY if self.tiny else DRAFT_1B

    @cached_property
    def target(self) -> LeanLM:
        model = random_model(self, self.target_shape, seed=1)
        return LeanLM.from_transformers(model, "target", self.precision, release=True)

    @cached_property
    def draft(self) -> LeanLM:
        model = random_model(self, self.draft_shape, seed=2)
        return LeanLM.from_transformers(model, "draft", self.precision, release=True)

    @cached_property
    def hf_target(self) -> Any:
        """The target in transformers' own form; the lean ones make room for it."""
        self.forget()
        return random_model(self, self.target_shape, seed=1)

    @cached_property
    def standard_run(self) -> tuple[Metrics, tuple[int, ...]]:
        return decode(self, lambda: standard(job(self, self.target)))

    @cached_property
    def floor(self) -> float:
        """Tokens per second if a token costs nothing but reading the target's weights at the speed of a copy."""
        return copy_rate(self) / target_bytes(self)

    def forget(self) -> None:
        """Free the memory of all models."""
        for name in ("target", "draft", "hf_target"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def say(self, name: str, line: str, **numbers: Any) -> None:
        print(f"{name}: {line}", flush=True)
        self.found[name] = {"said": line, **numbers}

    def run(self, part: Part) -> None:
        """One part; whatever goes wrong in it is said in a sentence and stays in it."""
        if self.deadline - time.monotonic() < part.seconds and not self.tiny:
            self.say(part.name, "left out: no time")
            return
        begin = time.monotonic()
        try:
            with torch.no_grad():
                part.measure(self)
        except Exception as error:
            first = (str(error).strip() or "no message").splitlines()[0]
            self.say(part.name, f"FAILED ({type(error).__name__}: {first[:160]})", ok=False)
        self.found.setdefault("seconds", {})[part.name] = round(time.monotonic() - begin, 1)
        if self.out:
            self.out.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")

    def seconds(self, work: Callable[[], object], repeats: int = 10) -> float:
        """Median seconds of `work`, after one call that is not timed."""
        work()
        taken = []
        for _ in range(repeats):
            self.wait()
            begin = time.perf_counter()
            work()
            self.wait()
            taken.append(time.perf_counter() - begin)
        return median(taken)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Part:
    """`seconds`: what it may take on a card; it is not begun with less time left."""

    name: str
    seconds: float
    measure: Callable[[Check], None]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte; ids beyond have no text. Random models need no more."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def llama_config(shape: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(_LLAMA3_ROPE), **shape)


def random_model(check: Check, shape: dict[str, Any], seed: int) -> Any:
    """A transformers Llama with random weights, made on the device and in its type: there is never a copy elsewhere."""
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(check.dtype)
    try:
        with torch.device(check.device):
            return LlamaForCausalLM(llama_config(shape)).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def target_bytes(check: Check) -> int:
    """Bytes of weights that a forward of one position reads: all but the embedding table, of which it reads a row."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(check.target_shape))
    size = torch.empty(0, dtype=check.dtype).element_size()
    table = 0 if model.config.tie_word_embeddings else model.model.embed_tokens.weight.numel()
    return size * (sum(weight.numel() for weight in model.parameters()) - table)


def prompt_ids(vocab_size: int) -> Tensor:
    return torch.randint(3, vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(7))


def copy_rate(check: Check) -> float:
    """Bytes read and written per second by a copy of 1 GiB (64 MiB on a CPU)."""
    size = 2**30 if check.device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=check.device).fill_(1)
    goal = torch.empty_like(source)
    return 2 * size / check.seconds(lambda: goal.copy_(source))


def copy(check: Check) -> None:
    rate = check.floor * target_bytes(check)
    check.say(
        "copy",
        f"{rate / 1e9:.0f} GB/s, so the target's {target_bytes(check) / 1e9:.2f} GB allow {check.floor:.1f} tokens/s",
        bytes_per_s=rate,
        target_bytes=target_bytes(check),
        floor_tokens_per_s=check.floor,
    )


def generate_speed(check: Check, name: str, **options: Any) -> None:
    """Tokens per second of transformers' `generate`, prefill taken out: the difference of a long and a short answer."""
    model = check.hf_target
    ids = prompt_ids(model.config.vocab_size)[None].to(check.device)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None

    def answer(count: int) -> float:
        check.wait()
        begin = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            **options,
        )
        check.wait()
        return time.perf_counter() - begin

    short = max(2, check.new_tokens // 8)
    for count in (short, check.new_tokens):  # compiles, where it compiles
        answer(count)
    speed = (check.new_tokens - short) / (answer(check.new_tokens) - answer(short))
    ours = check.found.get("standard", {}).get("tokens_per_s")
    ratio = f", standard is {ours / speed:.2f} x that" if ours else ""
    check.say(name, f"{speed:.1f} tokens/s{ratio}", tokens_per_s=speed, standard_speedup=ours / speed if ours else None)


def generate(check: Check) -> None:
    generate_speed(check, "generate")


def compiled(check: Check) -> None:
    if check.device.type != "cuda":
        check.say("compiled", "left out: transformers compiles on CUDA only")
        return
    generate_speed(check, "compiled", cache_implementation="static")
    torch.compiler.reset()


def graphs(check: Check) -> None:
    """Logits of the fixed-shape forward and of the eager one, over the same ids, at every width a round uses."""
    lm = check.target
    ids = prompt_ids(lm.vocab_size).to(check.device)
    recorded, eager = lm.open(PROMPT_TOKENS), lm.open(PROMPT_TOKENS)
    before, worst, same, total = lm.graphs, 0.0, 0, 0
    start = 64
    lm.graphs = True
    recorded.extend(ids[:start], keep=1)
    lm.graphs = False
    eager.extend(ids[:start], keep=1)
    for width in (1, 3, DRAFT_LENGTH + 1, 1, 16):
        chunk = ids[start : start + width]
        lm.graphs = True
        ours = recorded.extend(chunk, keep=width).clone()
        lm.graphs = False
        theirs = eager.extend(chunk, keep=width)
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
        same += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
        total += width
        start += width
    ran = "no CUDA graphs" not in lm.forward_path  # else it fell back, and was compared with itself
    lm.graphs = before and ran
    tolerance = 1e-4 if check.dtype == torch.float32 else 5e-2
    check.say(
        "graphs",
        ("" if ran else f"NOT RECORDED ({lm.forward_path}), ")
        + f"{'equal' if worst < tolerance else 'DIFFERENT'}: largest relative distance {worst:.1e}, "
        f"{same} of {total} likeliest tokens the same",
        distance=worst,
        ok=ran and worst < tolerance,
        same_argmax=same,
        positions=total,
    )
    recorded.close()
    eager.close()


def forward_seconds(check: Check, lm: LanguageModel, width: int) -> float:
    """Seconds of a forward of `width` positions behind the prompt."""
    ids = prompt_ids(lm.vocab_size).to(check.device)
    cache = lm.open(PROMPT_TOKENS + width)
    cache.extend(ids, keep=1)

    def forward() -> None:
        cache.extend(ids[:width], keep=width)
        cache.truncate(PROMPT_TOKENS)

    seconds = check.seconds(forward, repeats=30)
    cache.close()
    return seconds


def settings(check: Check, **changes: Any) -> Settings:
    return Settings(max_new_tokens=check.new_tokens, ignore_eos=True, draft_length=DRAFT_LENGTH, **changes)


def job(check: Check, target: LanguageModel) -> Job:
    ids = prompt_ids(target.vocab_size).tolist()
    return Job(target=target, text=check.text, prompt_ids=ids, settings=settings(check), explain=False)


def decode(check: Check, run: Callable[[], Any]) -> tuple[Metrics, tuple[int, ...]]:
    """Metrics and ids of the second of two runs; the first pays for what happens once."""
    events: list[Event] = []
    for _ in range(2):
        events = list(run())
        check.wait()
    last = events[-1]
    assert isinstance(last, Finished)
    return fold(events), last.token_ids


def standard_speed(check: Check) -> None:
    metrics, _ = check.standard_run
    speed = metrics.tokens_per_second or 0.0
    share = speed / check.floor
    check.say(
        "standard",
        f"{speed:.1f} tokens/s, {share:.2f} of the floor ({check.target.forward_path})",
        tokens_per_s=speed,
        of_floor=share,
        ok=share >= 0.70,
        forward_path=check.target.forward_path,
    )


def round_cost(check: Check) -> None:
    """A whole round of the engine against the forwards it consists of."""
    target, draft = check.target, check.draft
    verify = forward_seconds(check, target, DRAFT_LENGTH + 1)
    one, drafted = forward_seconds(check, target, 1), forward_seconds(check, draft, 1)
    floor = verify + DRAFT_LENGTH * drafted
    make = _draft_model(draft)
    metrics, _ = decode(check, lambda: speculative(job(check, target), make))
    round_s = (metrics.total_s - (metrics.ttft_s or 0.0)) / metrics.rounds
    check.say(
        "round",
        f"{1e3 * round_s:.2f} ms, {100 * (round_s / floor - 1):+.1f} % over T_verify {1e3 * verify:.2f} + "
        f"{DRAFT_LENGTH} x T_draft {1e3 * drafted:.2f}; one position {1e3 * one:.2f}, verify cost {verify / one:.2f}",
        round_s=round_s,
        overhead=round_s / floor - 1,
        ok=round_s / floor - 1 <= 0.05,
        verify_s=verify,
        draft_s=drafted,
        one_position_s=one,
    )


def _draft_model(draft: LanguageModel) -> Callable[[Job], Drafter]:
    return lambda job: DraftModel(draft, job.target, job.settings, job.capacity)


class ScriptedDrafter(DraftModel):
    """Runs its draft model, and then proposes the answer that is known to come, each token right with a given
    probability."""

    def __init__(self, draft: LanguageModel, job: Job, answer: Sequence[int], acceptance: float) -> None:
        super().__init__(draft, job.target, job.settings, job.capacity)
        self._prompt_length = len(job.prompt_ids)
        self._answer, self._acceptance = answer, acceptance

    def propose(self, tokens: Sequence[int], draft_length: int) -> Proposal:
        spent = super().propose(tokens, draft_length)
        count = spent.tokens.shape[0]
        if not count:
            return spent
        done = len(tokens) - self._prompt_length
        right = (list(self._answer[done : done + count]) + [0] * count)[:count]
        wrong = [uniform(0, len(tokens) + i, Purpose.DRAFT) >= self._acceptance for i in range(count)]
        vocab = self._target.vocab_size
        script = [(token + WRONG) % vocab if miss else token for token, miss in zip(right, wrong, strict=True)]
        device = self._target.device
        return Proposal(torch.tensor(script, device=device), None, origin="script", forwards=spent.forwards)


def scripted_speeds(check: Check) -> None:
    standard_metrics, answer = check.standard_run
    baseline = standard_metrics.tokens_per_second or 0.0
    for acceptance in (0.6, 0.8, 0.9):

        def make(job: Job, acceptance: float = acceptance) -> Drafter:
            return ScriptedDrafter(check.draft, job, answer, acceptance)

        metrics, _ = decode(check, lambda make=make: speculative(job(check, check.target), make))  # type: ignore[misc]
        speed = metrics.tokens_per_second or 0.0
        check.say(
            f"acceptance_{acceptance}",
            f"{speed:.1f} tokens/s, {speed / baseline:.2f} x standard, alpha {metrics.alpha or 0:.2f}, "
            f"{metrics.mean_acceptance_length or 0:.2f} tokens a round",
            tokens_per_s=speed,
            speedup=speed / baseline,
            alpha=metrics.alpha,
            mean_acceptance_length=metrics.mean_acceptance_length,
        )


def quantized_verify_cost(check: Check, kind: str) -> None:
    """T(K + 1) / T(1) of the draft's shape as `--quantize` loads it, and whether a row sees the rows after it."""
    if obstacle := bitsandbytes_obstacle() or card_obstacle(kind, check.device):
        check.say(kind, f"left out: {obstacle}")
        return
    check.forget()
    vocabulary = check.draft_shape["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        random_model(check, check.draft_shape, seed=2).save_pretrained(folder)
        config = transformers_config(Path(folder))
        lm = load_quantized(Path(folder), config, kind, kind, check.precision, check.device, vocabulary)
    apart = rows_apart(check, lm)
    one, several = forward_seconds(check, lm, 1), forward_seconds(check, lm, DRAFT_LENGTH + 1)
    check.say(
        kind,
        f"one position {1e3 * one:.2f} ms, {DRAFT_LENGTH + 1} cost {several / one:.2f} of it; logits of a position "
        f"differ by {apart:.2g} when others follow it",
        one_position_s=one,
        verify_cost=several / one,
        rows_apart=apart,
    )


def rows_apart(check: Check, lm: LanguageModel) -> float:
    """The greatest difference in the logits of a position, alone and with others after it: rounding at most."""
    ids = prompt_ids(lm.vocab_size).to(check.device)
    found = []
    for width in (1, DRAFT_LENGTH + 1):
        cache = lm.open(PROMPT_TOKENS + width)
        cache.extend(ids, keep=1)
        found.append(cache.extend(ids[:width], keep=width)[0].clone())
        cache.close()
    return float((found[0] - found[1]).abs().max())


def race(check: Check) -> None:
    """Both lanes through the arena, as the page runs them."""

    def load(progress: Any) -> Pair:
        if (check.embedded / "config.json").is_file():
            return load_pair(str(check.embedded), str(SHIPPED), device=str(check.device), progress=progress)
        target, draft = (
            LeanLM.from_transformers(random_model(check, shape, seed), name, check.precision, vocab_size=256)
            for shape, seed, name in ((TARGET_TINY, 3, "tiny target"), (DRAFT_TINY, 4, "tiny draft"))
        )
        return Pair(target, draft, check.text.tokenizer, check.text, frozenset(), Path())

    arena = Arena(load)
    arena.load()
    if arena.pair is None:
        check.say("race", f"FAILED: {arena.status.message}", ok=False)
        return
    raw = arena.pair.tokenizer.chat_template is None
    request = RaceRequest("Explain why the sky is blue.", settings(check), raw=raw)
    events = list(arena.race(request))
    if failed := [event for event in events if isinstance(event, Failed)]:
        check.say("race", f"FAILED: {failed[0].message}", ok=False)
        return
    lanes = {lane: [event for event in events if event.lane == lane] for lane in ("standard", "speculative")}
    speeds = {lane: fold(own).tokens_per_second or 0.0 for lane, own in lanes.items()}
    answers = [own[-1].token_ids for own in lanes.values() if isinstance(own[-1], Finished)]
    check.say(
        "race",
        f"{arena.pair.target.name} ({arena.pair.target.precision}, {arena.pair.target.forward_path}): "
        + ", ".join(f"{lane} {speed:.1f} tokens/s" for lane, speed in speeds.items())
        + f", answers {'equal' if answers[0] == answers[1] else 'part at a near tie'}",
        ok=True,
        **{f"{lane}_tokens_per_s": speed for lane, speed in speeds.items()},
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, also on a card")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="parts that would end later are left out")
    parser.add_argument("--embedded", type=Path, default=cache_folder() / "SmolLM2-135M-Instruct", metavar="FOLDER")
    parser.add_argument("--out", type=Path, help="write the JSON document here as well")
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    tiny = options.tiny or device.type != "cuda"
    deadline = time.monotonic() + options.seconds
    check = Check(device, tiny, TINY_TOKENS if tiny else NEW_TOKENS, deadline, options.embedded, options.out)
    check.found["environment"] = describe(device)
    shapes = "tiny shapes" if tiny else "an 8B target and a 1B draft"
    why = ", since there is no CUDA here: this shows that it runs and says nothing about speed"
    check.say("shapes", shapes + (why if device.type != "cuda" else ""), tiny=tiny, precision=check.precision)
    for part in PARTS:
        check.run(part)
    print(json.dumps(check.found))
    return 1 if any(check.found[name].get("ok") is False for name in MUST_HOLD) else 0


PARTS = (
    Part("copy", 10, copy),
    Part("graphs", 40, graphs),
    Part("standard", 30, standard_speed),
    Part("round", 40, round_cost),
    Part("acceptance", 40, scripted_speeds),
    Part("race", 40, race),
    Part("nf4", 40, partial(quantized_verify_cost, kind="nf4")),
    Part("int8", 40, partial(quantized_verify_cost, kind="int8")),
    Part("generate", 60, generate),
    Part("compiled", 210, compiled),
)
MUST_HOLD = ("graphs", "race")
"""Parts whose failure is the exit code; the others measure."""


if __name__ == "__main__":
    sys.exit(main())
