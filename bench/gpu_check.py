"""What a card gives: one command, under eight minutes, with torch and transformers only and without a network.

    python bench/gpu_check.py [--out FILE]

Random-weight Llamas of real shapes (8B target, 1B draft, bfloat16; tiny ones on a CPU or with --tiny) stand in for
trained models: speed does not depend on what weights say. In this order:

1. copy bandwidth, and the floor it sets: every weight read once a token
2. transformers' `generate`, eager and with a compiled static cache
3. the recorded (CUDA graph) forward against the eager one
4. standard decoding against the floor and against `generate`
5. a round against T_verify + K * T_draft
6. speed at a given acceptance: a scripted drafter that spends the real draft's time
7. what verifying costs with NF4 and int8 weights (bitsandbytes)
8. a race through the arena: the embedded pair if its files are in the cache, else tiny models

Each part says what it found in a line; a part for which there is no time or no library says so. The last line is
everything as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from specdemo.models.transformers_lm import TransformersLM
from specdemo.sampling import Purpose, uniform
from specdemo.settings import Settings
from specdemo.text import TokenText

LIMIT_S = 480.0
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
    """Where the run stands: its device, its deadline and what was found so far."""

    device: torch.device
    dtype: torch.dtype
    new_tokens: int
    deadline: float
    found: dict[str, Any] = field(default_factory=dict)
    text: TokenText = field(default_factory=lambda: TokenText(byte_tokenizer()))

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def say(self, name: str, line: str, **numbers: Any) -> None:
        print(f"{name}: {line}", flush=True)
        self.found[name] = numbers or line

    def time_for(self, name: str, seconds: float) -> bool:
        """Whether `seconds` are left; where not, says that `name` is left out."""
        enough = self.deadline - time.monotonic() > seconds
        if not enough:
            self.say(name, "left out, no time")
        return enough

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


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte; ids beyond have no text. Random models need no more."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def random_model(check: Check, shape: dict[str, Any], seed: int) -> Any:
    """A transformers Llama with random weights, made on the device."""
    config = LlamaConfig(max_position_embeddings=131072, rope_parameters=dict(_LLAMA3_ROPE), **shape)
    torch.manual_seed(seed)
    before = torch.get_default_dtype()
    torch.set_default_dtype(check.dtype)
    try:
        with torch.device(check.device):
            return LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)


def bytes_per_token(model: Any) -> int:
    """Bytes of weights that a forward of one position reads: all but the embedding table, of which it reads a row."""
    weights = {id(weight): weight for weight in model.parameters()}
    if not model.config.tie_word_embeddings:
        weights.pop(id(model.model.embed_tokens.weight))
    return sum(weight.numel() * weight.element_size() for weight in weights.values())


def prompt_ids(vocab_size: int) -> Tensor:
    return torch.randint(3, vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(7))


def bandwidth(check: Check) -> float:
    """Bytes read and written per second by a copy of 1 GiB (64 MiB on a CPU)."""
    size = 2**30 if check.device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=check.device).fill_(1)
    goal = torch.empty_like(source)
    rate = 2 * size / check.seconds(lambda: goal.copy_(source))
    check.say("copy_bandwidth", f"{rate / 1e9:.0f} GB/s", bytes_per_s=rate)
    return rate


def generate_speed(check: Check, model: Any, name: str, tokens: int, **options: Any) -> float | None:
    """Tokens per second of transformers' `generate`, prefill taken out: the difference of a long and a short answer."""
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

    short = max(2, tokens // 8)
    try:
        for count in (short, tokens):  # compiles, where it compiles
            answer(count)
        speed = (tokens - short) / (answer(tokens) - answer(short))
    except Exception as error:
        first = (str(error).strip() or "no message").splitlines()[0]
        check.say(name, f"cannot run here ({type(error).__name__}: {first[:120]})")
        return None
    check.say(name, f"{speed:.1f} tokens/s", tokens_per_s=speed)
    return speed


def graphs_against_eager(check: Check, lm: LeanLM) -> None:
    """Logits of the fixed-shape forward and of the eager one, over the same ids, at every width a round uses."""
    ids = prompt_ids(lm.vocab_size).to(check.device)
    recorded, eager = lm.open(PROMPT_TOKENS), lm.open(PROMPT_TOKENS)
    graphs, worst, same, total = lm.graphs, 0.0, 0, 0
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
    lm.graphs = graphs
    tolerance = 1e-4 if check.dtype == torch.float32 else 5e-2
    check.say(
        "graphs_against_eager",
        f"{'equal' if worst < tolerance else 'DIFFERENT'}: largest relative distance {worst:.1e}, "
        f"{same} of {total} likeliest tokens the same",
        distance=worst,
        ok=worst < tolerance,
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


def standard_speed(check: Check, lm: LeanLM, floor: float, others: Sequence[float | None]) -> tuple[float, list[int]]:
    metrics, answer = decode(check, lambda: standard(job(check, lm)))
    speed = metrics.tokens_per_second or 0.0
    ratios = ", ".join(f"{speed / other:.2f} x generate" for other in others if other)
    check.say(
        "standard",
        f"{speed:.1f} tokens/s, {speed / floor:.2f} of the floor's {floor:.1f}" + (f" ({ratios})" if ratios else ""),
        tokens_per_s=speed,
        of_floor=speed / floor,
        floor_tokens_per_s=floor,
        ok=speed / floor >= 0.70,
        forward_path=lm.forward_path,
    )
    return speed, list(answer)


def round_cost(check: Check, target: LeanLM, draft: LeanLM) -> None:
    """A whole round of the engine against the forwards it consists of."""
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


def scripted_speeds(check: Check, target: LeanLM, draft: LeanLM, answer: list[int], baseline: float) -> None:
    for acceptance in (0.6, 0.8, 0.9):

        def make(job: Job, acceptance: float = acceptance) -> Drafter:
            return ScriptedDrafter(draft, job, answer, acceptance)

        metrics, _ = decode(check, lambda make=make: speculative(job(check, target), make))  # type: ignore[misc]
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


def quantized_verify_cost(check: Check) -> None:
    """T(K + 1) / T(1) of a 1B model through transformers' forward with bitsandbytes weights."""
    name = "bitsandbytes"
    if check.device.type != "cuda":
        check.say(name, "left out: NF4 and int8 need a CUDA card")
        return
    try:
        import bitsandbytes  # noqa: F401
        from transformers import AutoModelForCausalLM, BitsAndBytesConfig
    except ImportError:
        check.say(name, "left out: bitsandbytes is not installed")
        return
    kinds = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16),
        "int8": BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    }
    with tempfile.TemporaryDirectory() as folder:
        random_model(check, DRAFT_1B, seed=2).save_pretrained(folder)
        for kind, config in kinds.items():
            try:
                model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cuda")
                lm = TransformersLM(model.eval(), kind, kind, DRAFT_1B["vocab_size"], 131072)
                one, several = forward_seconds(check, lm, 1), forward_seconds(check, lm, DRAFT_LENGTH + 1)
            except Exception as error:
                check.say(kind, f"cannot run here ({type(error).__name__}: {str(error)[:120]})")
                continue
            check.say(
                kind,
                f"one position {1e3 * one:.2f} ms, {DRAFT_LENGTH + 1} cost {several / one:.2f} of it",
                one_position_s=one,
                verify_cost=several / one,
            )


def race(check: Check) -> None:
    """Both lanes through the arena, as the page runs them."""

    def load(progress: Any) -> Pair:
        folder = cache_folder() / "SmolLM2-135M-Instruct"
        if (folder / "manifest.json").is_file():
            return load_pair(device=str(check.device), progress=progress)
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
    parser.add_argument("--new-tokens", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=LIMIT_S, help="parts that would end later are left out")
    parser.add_argument("--out", type=Path, help="write the JSON document here as well")
    options = parser.parse_args(arguments)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    device = torch.device(options.device)
    tiny = options.tiny or device.type != "cuda"
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    new_tokens = options.new_tokens or (24 if tiny else 128)
    check = Check(device, dtype, new_tokens, time.monotonic() + options.seconds)
    check.found["environment"] = describe(device)
    target_shape, draft_shape = (TARGET_TINY, DRAFT_TINY) if tiny else (TARGET_8B, DRAFT_1B)

    with torch.inference_mode():
        model = random_model(check, target_shape, seed=1)
        floor = bandwidth(check) / bytes_per_token(model)
        eager = generate_speed(check, model, "generate_eager", check.new_tokens)
        static = None
        if device.type != "cuda":
            check.say("generate_static_compiled", "left out: transformers compiles on CUDA only")
        elif check.time_for("generate_static_compiled", 330):
            static = generate_speed(
                check, model, "generate_static_compiled", check.new_tokens, cache_implementation="static"
            )
            torch.compiler.reset()

        target = LeanLM.from_transformers(model, "target", check.precision, release=True)
        del model
        draft = LeanLM.from_transformers(random_model(check, draft_shape, seed=2), "draft", check.precision)
        graphs_against_eager(check, target)
        speed, answer = standard_speed(check, target, floor, (eager, static))
        if check.time_for("round", 60):
            round_cost(check, target, draft)
        if check.time_for("acceptance", 60):
            scripted_speeds(check, target, draft, answer, speed)
    del target, draft
    if check.time_for("bitsandbytes", 60):
        quantized_verify_cost(check)
    if check.time_for("race", 20):
        race(check)

    document = json.dumps(check.found)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(document + "\n", encoding="utf-8")
    print(document)
    bad = [name for name, part in check.found.items() if isinstance(part, dict) and part.get("ok") is False]
    wrong = [name for name in bad if name in ("graphs_against_eager", "race")]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
