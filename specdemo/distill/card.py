"""The model card that a distilled draft ends with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..models.reduced_vocab import CONFIG, WEIGHTS, DraftConfig
from .evaluate import Acceptance
from .train import Progress, Recipe

CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Story:
    """What a card tells besides the configuration. data: one sentence on where the text came from. suite_prompts: how
    many prompts of the evaluation suite were looked for in the data, and found in it."""

    data: str
    conversations: int
    answer_tokens: int
    recipe: Recipe
    progress: Progress
    held_out: dict[str, float]
    acceptance: dict[int, Acceptance]  # by draft_length, over held-out greedy answers
    suite_prompts: tuple[int, int]
    wired: bool


def write_card(folder: Path, config: DraftConfig, story: Story) -> None:
    size = (folder / WEIGHTS).stat().st_size
    looked, found = story.suite_prompts
    rows = "\n".join(
        f"| {k} | {a.alpha:.3f} | {a.mean_acceptance_length:.2f} |" for k, a in sorted(story.acceptance.items())
    )
    start = "the target's first and last layers"
    if story.wired:
        start += ", with a circuit wired in by hand that copies what followed the same two tokens before"
    licence = config.license or "that of the target, from which it is derived"
    text = f"""# A draft model for {config.target}

A small Llama that proposes tokens for {config.target} to verify (speculative decoding). It cannot be used without its
target: it reads the target's token embeddings and scores {config.draft_vocab_size:,} of its
{config.target_vocab_size:,} ids with rows of the same table. Both are shared with the target in memory and are not in
this folder. To the embeddings of the ids that it scores it adds offsets of its own.

- `{CONFIG}`: sizes, target, hash of the weights
- `{WEIGHTS}`: {size / 1e6:.1f} MB; layers and offsets in 8 bits with a scale per row, the vocabulary's ids

| | |
|---|---|
| layers | {config.num_hidden_layers} |
| hidden / intermediate size | {config.hidden_size} / {config.intermediate_size} |
| heads / key-value heads | {config.num_attention_heads} / {config.num_key_value_heads} |

## Data

{story.data}
{story.conversations:,} conversations with {story.answer_tokens:,} tokens of answers; no text from elsewhere was used.
Of the {looked} prompts of the evaluation suite, {found} occur in it.

## Recipe

Started from {start}.
What is learned are the layers, the final norm and the offsets. AdamW, peak learning rate
{story.recipe.learning_rate:g}, about {story.recipe.tokens_per_batch:,} tokens a batch, the rate falling to zero as the
time runs out; cross-entropy against the target's four likeliest tokens at every token of answers and questions.
{story.progress.tokens:,} tokens seen ({story.progress.step:,} steps, {story.progress.seconds / 60:.0f} minutes).

## Figures

On held-out conversations ({int(story.held_out["rows"]):,} answer tokens, greedy and sampled) the draft's likeliest
token is the target's on {100 * story.held_out["agreement"]:.1f} %; the sum of min(p, q) over the target's four
likeliest tokens is {story.held_out["overlap"]:.3f}. On the greedy ones among them, at temperature 0:

| draft_length | alpha | mean_acceptance_length |
|---|---|---|
{rows}

## Licence and limits

Licence: {licence}. The draft changes the speed of its target's text and nothing else: what is true or false in that
text is the target's doing. It is best where that text is most like its training text, short answers in English, and
worth less in other languages, at high temperature, and for tokens outside its vocabulary, which it never proposes.
"""
    (folder / CARD).write_text(text, encoding="utf-8")
