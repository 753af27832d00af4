"""transformers' own `generate` on the same weights: the honest yardstick beside our engines.

`hf` decodes token by token, `hf-lookup` with the library's prompt lookup, `hf-assisted` with its assisted generation,
drafting a fixed K tokens a round. `hf-universal` takes a draft model of another tokenizer, whose drafts the library
carries over as text: K are its own tokens, and what is counted are the target's that these became. A stopping
criterion, which `generate` calls after every commit anyway, notes the time; a hook notes how many positions each target
forward has. Nothing else is added, so the times are the library's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from .engines.job import Job
from .engines.output import Output
from .errors import BadRequest, ModelUnavailable
from .events import FinishReason
from .metrics import Metrics
from .models.loading import Pair, find_model, load_tokenizer
from .models.reduced_vocab import is_draft_folder
from .models.transformers_lm import TransformersLM
from .settings import Settings

METHODS = ("hf", "hf-lookup", "hf-assisted", "hf-universal")


@dataclass(frozen=True, slots=True)
class Commit:
    """One target forward of `generate`: when its tokens were committed (seconds since the call), how many, and how
    many drafted tokens the forward verified."""

    t: float
    tokens: int
    drafted: int


@dataclass(frozen=True, slots=True)
class Generation:
    """One call of `generate`. Assisted generation drafts before the prompt has been read, so its first commit may hold
    several tokens; decode speed is that of the tokens after the first commit."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    commits: tuple[Commit, ...]
    total_s: float

    @property
    def metrics(self) -> Metrics:
        return pool([self])


def pool(runs: Sequence[Generation]) -> Metrics:
    """The metrics of several calls taken together; seconds are means over the calls. What happens between two commits
    is not divided into drafting and verifying, so those costs stay unknown."""
    commits = [commit for run in runs for commit in run.commits]
    kept = [min(commit.tokens - 1, commit.drafted) for commit in commits]
    drafted, accepted = sum(commit.drafted for commit in commits), sum(kept)
    refusals = sum(n < commit.drafted for n, commit in zip(kept, commits, strict=True))
    tokens = sum(len(run.token_ids) for run in runs)
    later = [(run.commits[-1].t - run.commits[0].t, max(0, len(run.token_ids) - run.commits[0].tokens)) for run in runs]
    decode_s, decoded = (sum(values) for values in zip(*later, strict=True))
    tpot = decode_s / decoded if decoded > 0 and decode_s > 0 else None
    by_position = []
    for i in range(max((commit.drafted for commit in commits), default=0)):
        judged = [n > i for n, commit in zip(kept, commits, strict=True) if commit.drafted > i and n >= i]
        if judged:
            by_position.append(sum(judged) / len(judged))
    return Metrics(
        tokens=tokens,
        rounds=len(commits),
        ttft_s=sum(run.commits[0].t for run in runs) / len(runs),
        tpot_s=tpot,
        tokens_per_second=1.0 / tpot if tpot else None,
        total_s=sum(run.total_s for run in runs) / len(runs),
        drafted=drafted,
        accepted=accepted,
        accepted_histogram=tuple(kept.count(i) for i in range(max(kept, default=-1) + 1)),
        acceptance_rate=accepted / drafted if drafted else None,
        alpha=accepted / (accepted + refusals) if accepted + refusals else None,
        mean_acceptance_length=tokens / len(commits),
        acceptance_by_position=tuple(by_position),
        cost_ratio=None,
        verify_cost=None,
        forward_s=(),
        draft_forward_s=None,
        draft_s=0.0,
        verify_s=0.0,
        overhead_s=0.0,
        hit_rate=None,
    )


class TransformersModels:
    """The models that `generate` runs on, loaded when first asked for and shared by the lanes. `assistant` names the
    draft model (hub id or folder) where it is not the pair's own."""

    def __init__(self, pair: Pair, assistant: str | None = None) -> None:
        self.pair = pair
        self.dtype = pair.target.dtype
        own = pair.draft if pair.draft_folder and not is_draft_folder(pair.draft_folder) else None
        self.assistant_name = assistant or (own.name if own else None)
        self._own_draft = assistant is None

    @property
    def precision(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @cached_property
    def target(self) -> Any:
        if isinstance(self.pair.target, TransformersLM):
            return self.pair.target.model
        return self._load(self.pair.target_folder, self.pair.target.name)

    @cached_property
    def assistant(self) -> Any:
        """For hf-assisted. Raises BadRequest where there is no draft, ModelUnavailable where transformers cannot load
        or use it."""
        if self.assistant_name is None:
            raise BadRequest("hf-assisted needs a draft model that transformers can load: name one with --assistant.")
        theirs, ours = self._vocabulary_sizes()
        if theirs != ours:
            raise ModelUnavailable(
                f"transformers assists only with a draft model of the same vocabulary size ({self.assistant_name} has "
                f"{theirs} ids, the target {ours}): give its plain export with --assistant, or leave out hf-assisted."
            )
        return self._assistant_model

    @cached_property
    def universal(self) -> tuple[Any, Any]:
        """For hf-universal: a draft model of another tokenizer, and this. Raises BadRequest, ModelUnavailable."""
        if self.assistant_name is None:
            raise BadRequest("hf-universal needs a draft model, of any tokenizer: name one with --assistant.")
        theirs, ours = self._vocabulary_sizes()
        if theirs == ours:
            raise ModelUnavailable(
                f"transformers takes models of the same vocabulary size ({ours} ids) for models of one tokenizer: use "
                "hf-assisted in place of hf-universal."
            )
        return self._assistant_model, load_tokenizer(self._assistant_folder, self.assistant_name)

    def _vocabulary_sizes(self) -> tuple[int, int]:
        """Of the draft model and of the target."""
        theirs, ours = (m.config.get_text_config().vocab_size for m in (self._assistant_model, self.target))
        return int(theirs), int(ours)

    @cached_property
    def _assistant_folder(self) -> Path:
        own = self.pair.draft_folder if self._own_draft else None
        return own or find_model(self.assistant_name or "")

    @cached_property
    def _assistant_model(self) -> Any:
        draft = self.pair.draft
        if self._own_draft and isinstance(draft, TransformersLM):
            return draft.model
        return self._load(self._assistant_folder, self.assistant_name or "")

    def _load(self, folder: Path, name: str) -> Any:
        transformers_logging.disable_progress_bar()
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=self.dtype, use_safetensors=True, trust_remote_code=False
            )
            return model.eval().to(self.pair.target.device)
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise ModelUnavailable(
                f"transformers cannot load {name} ({reason}): give a plain model folder, for a draft with --assistant."
            ) from None


class TransformersLane:
    """One of METHODS. Raises SpecdemoError at once where it cannot run."""

    forward_path = "transformers generate"
    draft: str | None = None
    draft_precision: str | None = None

    def __init__(self, method: str, models: TransformersModels) -> None:
        self.method = method
        self.models = models
        self.precision = models.precision
        if method == "hf-assisted":
            self.draft, self.draft_precision = models.assistant_name, models.precision
            _ = models.assistant  # loaded now, so that a fault is told before anything has run
        if method == "hf-universal":
            self.draft, self.draft_precision = models.assistant_name, models.precision
            _ = models.universal
        standard = models.pair.target.precision
        differs = standard != models.precision
        self.notes: tuple[str, ...] = (
            (f"{method} runs {models.precision}; the standard lane runs {standard}.",) if differs else ()
        )

    def run(
        self, prompt_ids: Sequence[int], settings: Settings, should_stop: Callable[[], bool] = lambda: False
    ) -> Generation:
        """One timed call. Raises BadRequest for what `generate` cannot do."""
        models, pair = self.models, self.models.pair
        if self.method == "hf-lookup" and settings.draft_length == 0:
            raise BadRequest("hf-lookup drafts at least one token: raise the draft length or leave it out.")
        job = Job(pair.target, pair.text, prompt_ids, settings, pair.eos_ids, should_stop=should_stop)
        config = _config(job, pair.tokenizer.pad_token_id)
        assistant, tokenizers = None, {}
        if self.method == "hf-assisted":
            assistant = models.assistant
        elif self.method == "hf-universal":
            if not settings.greedy:  # with sampling it cuts the draft model's head to the tokens that both have
                raise BadRequest("hf-universal runs at temperature 0 only: leave it out, or set the temperature to 0.")
            assistant, other = models.universal
            tokenizers = {"tokenizer": pair.tokenizer, "assistant_tokenizer": other}
        if self.method == "hf-lookup":
            config.prompt_lookup_num_tokens = settings.draft_length
        ids = torch.tensor([prompt_ids], device=pair.target.device)
        watch = _Watch(job, ids.device)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(_quiet())
            stack.enter_context(_seeded(settings.seed, ids.device))
            stack.enter_context(_generation_config(models.target, config))
            stack.enter_context(watch.counting(models.target))
            if assistant is not None:
                fixed = GenerationConfig(
                    num_assistant_tokens=settings.draft_length,
                    num_assistant_tokens_schedule="constant",
                    assistant_confidence_threshold=0.0,
                )
                stack.enter_context(_generation_config(assistant, fixed))
            watch.start()
            sequences = models.target.generate(
                inputs=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([watch]),
                assistant_model=assistant,
                **tokenizers,
            )
            total_s = watch.now()
        output = job.output()
        output.commit(sequences[0, len(prompt_ids) :].tolist())
        output.cancel()  # where nothing else ended it
        assert output.finish_reason is not None
        return Generation(tuple(output.ids), output.finish_reason, watch.commits(), total_s)

    def pool(self, runs: Sequence[Generation]) -> Metrics:
        return pool(runs)


class _Watch(StoppingCriteria):
    """Notes time and length after every commit; ends the run at a stop string or at the user's wish."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self._job = job
        self._cuda = device if device.type == "cuda" else None
        self._begin = 0.0
        self._lengths = [len(job.prompt_ids)]
        self._times: list[float] = []
        self._widths: list[int] = []
        self._stop_output: Output | None = job.output() if job.settings.stop else None
        self._verdicts = {end: torch.tensor([end], device=device) for end in (False, True)}

    @contextmanager
    def counting(self, model: Any) -> Iterator[None]:
        """Note the positions of every forward of `model`."""

        def note(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
            self._widths.append(kwargs["input_ids"].shape[1])

        handle = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def start(self) -> None:
        self._synchronize()
        self._begin = time.perf_counter()

    def now(self) -> float:
        self._synchronize()
        return time.perf_counter() - self._begin

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """bool [1]: whether to end."""
        self._times.append(self.now())
        length = input_ids.shape[1]
        self._lengths.append(length)
        end = self._job.should_stop()
        if self._stop_output is not None:
            self._stop_output.commit(input_ids[0, self._lengths[-2] :].tolist())
            end = end or self._stop_output.finish_reason is not None
        return self._verdicts[end]

    def commits(self) -> tuple[Commit, ...]:
        fed = [self._widths[0] - len(self._job.prompt_ids), *(width - 1 for width in self._widths[1:])]
        added = [after - before for before, after in zip(self._lengths, self._lengths[1:], strict=False)]
        return tuple(Commit(*commit) for commit in zip(self._times, added, fed, strict=True))

    def _synchronize(self) -> None:
        # `generate` waits for each token's verdict right after this call anyway, so nothing is lost by waiting here
        if self._cuda is not None:
            torch.cuda.synchronize(self._cuda)


def _config(job: Job, pad_token_id: int | None) -> GenerationConfig:
    """The run's settings and nothing else: what a model's own configuration says about sampling must not sneak in."""
    settings = job.settings
    eos_ids = [] if settings.ignore_eos else sorted(job.eos_ids)
    config = GenerationConfig(
        max_new_tokens=job.budget,
        do_sample=not settings.greedy,
        repetition_penalty=settings.repetition_penalty,
        eos_token_id=eos_ids or None,
        pad_token_id=pad_token_id if pad_token_id is not None else next(iter(sorted(job.eos_ids)), 0),
    )
    if not settings.greedy:
        config.update(temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p)
        config.update(min_p=settings.min_p or None)
    return config


@contextmanager
def _generation_config(model: Any, config: GenerationConfig) -> Iterator[None]:
    """Give the model another generation config for a while: `generate` fills every gap from the model's own."""
    saved = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = saved


@contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """`generate` draws from torch's global generators; they are seeded, and restored afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """No advice of the library about how assisted generation calls itself."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
