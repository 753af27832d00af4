"""Distillation learns: on a small target that writes structured text, from nothing to a draft that is accepted.

The target is a tiny Llama taught a made-up language for a few seconds: each word has a usual successor, so there is
something to learn that random weights do not know, and a draft that learned nothing is told from one that did.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specdemo.distill import command
from specdemo.distill.data import (
    ANSWER,
    QUESTION,
    Corpus,
    collate,
    frequent_ids,
    grouped,
    load,
    occurrences,
    split,
    with_questions,
)
from specdemo.distill.evaluate import acceptance, agreements, greedy_answers
from specdemo.distill.export import export_draft, export_plain
from specdemo.distill.generate import Frame, Writer, choose, generate
from specdemo.distill.requests import seed_words
from specdemo.distill.slots import SlotDecoder
from specdemo.distill.student import Student, target_parts
from specdemo.distill.train import Recipe, evaluate, schedule, train
from specdemo.distill.whole_requests import whole_request
from specdemo.distill.wiring import wire
from specdemo.errors import BadRequest, ModelUnavailable
from specdemo.models.lean import LeanLM
from specdemo.models.reduced_vocab import CONFIG, WEIGHTS, is_draft_folder, load_draft, read_draft
from specdemo.plan.load import load_fitting

WORDS = 88
SPECIAL = ["<unk>", "<start>", "<end>", "user", "assistant"]
START, END, USER, ASSISTANT = 1, 2, 3, 4
TEMPLATE = (
    "{% for m in messages %}<start> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<start> assistant {% endif %}"
)
SLOTS = 32


def sentence(chance: np.random.Generator, length: int) -> list[int]:
    """Words that mostly follow each other in one fixed way."""
    successor = np.random.default_rng(7).permutation(WORDS)
    word = int(chance.integers(WORDS))
    words = [word]
    while len(words) < length:
        word = int(successor[word]) if chance.random() < 0.9 else int(chance.integers(WORDS))
        words.append(word)
    return [len(SPECIAL) + word for word in words]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny Llama that speaks the language, in conversations."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("target")
    config = LlamaConfig(
        vocab_size=len(SPECIAL) + WORDS,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=START,
        eos_token_id=END,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    chance = np.random.default_rng(0)
    for _ in range(120):
        rows = []
        for _ in range(16):
            question, answer = sentence(chance, int(chance.integers(4, 10))), sentence(chance, 26)
            text = [START, USER, *question, END, START, ASSISTANT, *answer, END]
            rows.append((text + [0] * 48)[:48])
        ids = torch.tensor(rows)
        labels = ids.masked_fill(ids == 0, -100)
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    names = [*SPECIAL, *(f"w{i}" for i in range(WORDS))]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        eos_token="<end>",
        bos_token="<start>",
        additional_special_tokens=[],
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def shards(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return written(target, tmp_path_factory.mktemp("data"), 6000)


def written(target: Path, folder: Path, tokens: int, exclude: Sequence[str] = ()) -> list[Path]:
    return generate(
        folder, target, tokenizer(), {END}, tokens, torch.device("cpu"), SLOTS, exclude=exclude, shard_tokens=3000
    )


def fresh(target: Path, corpus: Corpus, vocab: int = 80) -> Student:
    torch.manual_seed(0)
    ids = torch.tensor(frequent_ids(corpus, split(corpus)[0], vocab, always=[END]))
    return Student.from_target(target_parts(target), 2, 64, ids)


def alpha(student: Student, corpus: Corpus, conversations: Sequence[int]) -> float:
    return acceptance(agreements(student, corpus, greedy_answers(corpus, conversations)), 4).alpha


# The text


def test_conversations_follow_the_template_and_end_by_the_rules(shards: list[Path]) -> None:
    corpus = load(shards)
    assert corpus.answer_tokens() >= 6000
    ended = 0
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True):
        tokens, roles = corpus.tokens[begin:end].tolist(), corpus.role[begin:end]
        first = int(np.argmax(roles == ANSWER))
        answer = tokens[first:]
        assert tokens[:2] == [START, USER]
        assert tokens[first - 3 : first] == [END, START, ASSISTANT]
        assert (roles[first:] == ANSWER).all()
        assert (roles[first - 3 : first] == 0).all()
        assert END not in answer[:-1]
        assert len(answer) <= 220
        ended += answer[-1] == END
        assert answer[-1] == END or len(answer) in (96, 160, 220)
    assert ended > len(corpus) / 2


def test_stored_probabilities_are_the_targets(target: Path, shards: list[Path]) -> None:
    corpus = load(shards)
    model = AutoModelForCausalLM.from_pretrained(target)
    for i in (0, 7, len(corpus) - 1):
        span = slice(int(corpus.offsets[i]), int(corpus.offsets[i + 1]))
        ids = torch.from_numpy(corpus.tokens[span]).long()
        with torch.no_grad():
            expected = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        stored = torch.from_numpy(corpus.top_logprobs[span][1:].astype(np.float32))
        at = expected[:-1].gather(1, torch.from_numpy(corpus.top_ids[span][1:]).long())
        torch.testing.assert_close(stored, at, atol=0.01, rtol=0.01)
        torch.testing.assert_close(at, expected[:-1].topk(4).values, atol=1e-3, rtol=1e-3)


def test_most_answers_are_greedy_and_some_are_not(shards: list[Path]) -> None:
    corpus = load(shards)
    share = len(greedy_answers(corpus, range(len(corpus)))) / len(corpus)
    assert 0.4 < share < 0.9


def test_writing_goes_on_where_it_stopped(target: Path, tmp_path: Path) -> None:
    before = written(target, tmp_path, 1500)
    assert written(target, tmp_path, 1500) == before
    bytes_before = [shard.read_bytes() for shard in before]
    after = written(target, tmp_path, 3000)
    assert after[: len(before)] == before
    assert len(after) > len(before)
    assert [shard.read_bytes() for shard in before] == bytes_before
    questions = questions_of(load(after))
    assert len(set(questions)) == len(questions)


def questions_of(corpus: Corpus) -> list[tuple[int, ...]]:
    questions = []
    for begin, end in zip(corpus.offsets[:-1], corpus.offsets[1:], strict=True):
        first = int(np.argmax(corpus.role[begin:end] == ANSWER))
        questions.append(tuple(corpus.tokens[begin + 2 : begin + first - 3].tolist()))
    return questions


def test_excluded_questions_are_not_written(target: Path, tmp_path: Path) -> None:
    free = questions_of(load(written(target, tmp_path / "free", 600)))
    unwanted = tokenizer().decode(free[0])
    kept = questions_of(load(written(target, tmp_path / "kept", 600, exclude=[unwanted])))
    assert free[0] not in kept
    assert set(free[1:]) & set(kept), "the same seed writes other conversations: the test says nothing"


def test_a_choice_is_greedy_at_zero_and_from_the_nucleus_above() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.9, -5.0]]).repeat(400, 1)
    generator = torch.Generator().manual_seed(0)
    ids, logprobs, drawn = choose(logits, torch.zeros(400), generator)
    assert drawn.unique().tolist() == [1]
    assert ids[0].tolist() == [1, 3, 2, 0]
    torch.testing.assert_close(logprobs[0], logits[0].log_softmax(-1)[ids[0]])
    _, _, drawn = choose(logits, torch.ones(400), generator)
    assert set(drawn.tolist()) == {1, 3, 2}, "ids 0 and 4 lie outside the likeliest 95 %"


def test_without_a_template_the_text_is_one_answer() -> None:
    bare = tokenizer()
    bare.chat_template = None
    assert Frame.of(bare, [END]) == Frame([START], [], frozenset([END]))


def test_seed_words_are_spread_and_repeat() -> None:
    words = [seed_words(number, seed=1) for number in range(400)]
    assert words == [seed_words(number, seed=1) for number in range(400)]
    assert len(set(words)) > 120
    assert words != [seed_words(number, seed=2) for number in range(400)]


def test_whole_requests_are_many_and_repeat_and_have_no_gap_left() -> None:
    asked = [whole_request(number, seed=1) for number in range(1000)]
    assert asked == [whole_request(number, seed=1) for number in range(1000)]
    assert len(set(asked)) > 800
    assert asked != [whole_request(number, seed=2) for number in range(1000)]
    gap = re.compile(r"\{[a-z_]+\}")
    assert not [request for request in asked if gap.search(request)]


def test_a_task_on_a_text_comes_with_the_text() -> None:
    asked = [whole_request(number, seed=1) for number in range(2000)]
    renamed = [re.match(r"Rename (\w+) to .*?\n\n(.*)", request, re.DOTALL) for request in asked]
    pairs = [match.groups() for match in renamed if match]
    assert pairs
    assert all(re.search(rf"\b{name}\b", code) for name, code in pairs)
    about = re.compile(r"Answer from this note only: .* the ([\w ]+?) (?:open|closed).*Note: The \1 ", re.DOTALL)
    noted = [request for request in asked if request.startswith("Answer from this note only")]
    assert noted
    assert all(map(about.match, noted))


def test_whole_requests_are_answered_like_invented_ones(target: Path, tmp_path: Path) -> None:
    frame = Frame.of(tokenizer(), {END})
    decoder = SlotDecoder.from_folder(target, 4, 200, torch.device("cpu"))

    def spell(text: str) -> list[int]:
        return [5 + ord(letter) % WORDS for letter in text[:20]]

    writer = Writer(decoder, frame, spell, 4, seed=0)
    while len(writer.finished) < 12:
        writer.step()
    whole = {tuple(spell(whole_request(number, 0))) for number in range(200)}
    questions = [text.tokens[len(frame.opening) :][:20] for text in writer.finished]
    assert sum(tuple(question) in whole for question in questions) in range(2, 11)
    assert all(text.roles[-1] == ANSWER for text in writer.finished)


def test_slots_write_what_the_model_would_write_alone(target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target)
    decoder = SlotDecoder.from_folder(target, 3, 40, torch.device("cpu"))
    ids = torch.randint(5, WORDS, (3, 12), generator=torch.Generator().manual_seed(1))
    for t in range(12):
        if t == 4:
            decoder.reset(1)
        logits = decoder.step(ids[:, t])
    with torch.no_grad():
        expected = torch.stack([model(ids[i : i + 1, 4 if i == 1 else 0 :]).logits[0, -1] for i in range(3)])
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3)


def test_what_all_texts_begin_with_is_read_once(target: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(target)
    decoder = SlotDecoder.from_folder(target, 3, 40, torch.device("cpu"))
    opening = [7, 9, 11, 6, 8]
    ids = torch.randint(5, WORDS, (3, 10), generator=torch.Generator().manual_seed(1))
    read = decoder.begin_with(opening)
    for slot in range(3):
        decoder.reset(slot)
    for t in range(10):
        if t == 4:
            decoder.reset(1)
        logits = decoder.step(ids[:, t])
    with torch.no_grad():
        alone = model(torch.tensor([opening])).logits[0]
        texts = [torch.tensor([[*opening, *ids[i, 4 if i == 1 else 0 :].tolist()]]) for i in range(3)]
        expected = torch.stack([model(text).logits[0, -1] for text in texts])
    torch.testing.assert_close(read, alone, rtol=5e-3, atol=5e-3)
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3)


# The data


def test_every_conversation_is_learned_from_once_an_epoch(shards: list[Path]) -> None:
    corpus = load(shards)
    training, held_out = split(corpus)
    assert sorted(training + held_out) == list(range(len(corpus)))
    assert 0 < len(held_out) < len(training) / 5
    groups = grouped(corpus, training, 400, seed=3)
    assert sorted(i for group in groups for i in group) == training
    assert groups != grouped(corpus, training, 400, seed=4)


def test_a_batch_asks_for_the_token_after_each_row(shards: list[Path]) -> None:
    corpus = load(shards)
    batch = collate(corpus, [5, 2])
    row = 0
    for b, i in enumerate((5, 2)):
        begin, end = int(corpus.offsets[i]), int(corpus.offsets[i + 1])
        for index in range(begin + 1, end):
            if corpus.role[index] == ANSWER:
                assert batch.rows[row] == b * batch.ids.shape[1] + index - begin - 1
                assert batch.top_ids[row].tolist() == corpus.top_ids[index].tolist()
                row += 1
    assert row == len(batch.rows)


def test_questions_are_learned_where_asked_for_and_only_with_an_opinion(shards: list[Path]) -> None:
    corpus = load(shards)
    invented = np.flatnonzero(corpus.role == QUESTION)[0]  # the others are whole requests of ours
    asked = int(np.searchsorted(corpus.offsets, invented, side="right")) - 1
    lessons = with_questions(corpus, [asked])
    changed = np.flatnonzero(lessons.role != corpus.role)
    inside = (changed >= corpus.offsets[asked]) & (changed < corpus.offsets[asked + 1])
    assert len(changed) > 0
    assert inside.all()
    assert (corpus.role[changed] == QUESTION).all()
    assert (lessons.role[changed] == ANSWER).all()
    assert (corpus.top_logprobs[changed, 0] != 0).all()
    assert len(collate(lessons, [asked]).rows) == len(collate(corpus, [asked]).rows) + len(changed)


def test_prompts_are_found_in_the_data_where_they_are(shards: list[Path]) -> None:
    corpus = load(shards)
    some = corpus.tokens[40:49].tolist()
    assert occurrences(corpus, some) >= 1
    assert occurrences(corpus, [*some, 999]) == 0
    assert occurrences(corpus, corpus.tokens[-3:].tolist()) >= 1


# Learning


def test_training_teaches_and_acceptance_rises(target: Path, shards: list[Path], tmp_path: Path) -> None:
    corpus = load(shards)
    training, held_out = split(corpus)
    student = fresh(target, corpus)
    assert wire(student, target_parts(target), counts(corpus, target))
    before, alpha_before = evaluate(student, corpus, held_out), alpha(student, corpus, held_out)
    lines: list[dict[str, float]] = []
    train(student, corpus, training, held_out, Recipe(minutes=5, steps=50, learning_rate=4e-3), tmp_path, lines.append)
    after = evaluate(student, corpus, held_out)
    assert after["loss"] < 0.8 * before["loss"]
    assert after["agreement"] > before["agreement"] + 0.2
    assert alpha(student, corpus, held_out) > alpha_before + 0.2
    assert lines[-1]["tokens"] > 0
    assert [line["step"] for line in lines_of(tmp_path / "log.jsonl")] == [line["step"] for line in lines]


def counts(corpus: Corpus, target: Path) -> torch.Tensor:
    size = len(target_parts(target).embeddings)
    return torch.bincount(torch.from_numpy(corpus.tokens).long(), minlength=size).float()


def test_the_rate_rises_holds_and_falls_to_zero() -> None:
    recipe = Recipe(minutes=1, warmup=0.1, hold=0.5)
    factors = [schedule(share, recipe) for share in (0.0, 0.05, 0.1, 0.5, 0.75, 1.0, 1.1)]
    assert factors == pytest.approx([0.01, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0])


def test_the_loss_and_its_gradient_are_those_of_the_plain_formula(target: Path, shards: list[Path]) -> None:
    corpus = load(shards)
    student = fresh(target, corpus, vocab=40)
    batch = collate(corpus, range(3))
    reduced = student.reduced_of_full[batch.top_ids]
    assert (reduced < 0).any(), "every token is in the vocabulary: the test says too little"
    weights = batch.top_probs * (reduced >= 0)
    plain = -(student(batch).log_softmax(-1).gather(1, reduced.clamp(min=0)) * weights).sum()
    expected = torch.autograd.grad(plain, list(student.parameters()))
    loss = student.loss(batch)
    torch.testing.assert_close(loss, plain, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(torch.autograd.grad(loss, list(student.parameters())), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_rounds_are_counted_as_decoding_would() -> None:
    agreed = [np.array([False, True, True, False, True, True, True, True, True])]
    # the first token is the prefill's; K = 2: two and the miss, two and the next, one and the last
    result = acceptance(agreed, 2)
    assert (result.accepted, result.judged, result.rounds) == (5, 5, 3)
    assert result.mean_acceptance_length == pytest.approx(8 / 3)
    assert acceptance(agreed, 4).alpha == pytest.approx(6 / 7)
    assert acceptance([np.array([True])], 4).rounds == 0


# The files


def with_offsets(target: Path, corpus: Corpus) -> Student:
    """As trained: the embeddings' offsets are no longer zero."""
    student = fresh(target, corpus)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        student.offsets.copy_(0.3 * student.embeddings.std() * torch.randn(student.offsets.shape, generator=generator))
    return student


@pytest.fixture(scope="module")
def draft(target: Path, shards: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    corpus = load(shards)
    student = with_offsets(target, corpus)
    folder = tmp_path_factory.mktemp("draft")
    export_draft(student, folder, "tiny", 512, [corpus.text(i) for i in range(16)])
    return folder


def test_a_loaded_draft_scores_as_the_one_that_was_trained(target: Path, draft: Path, shards: list[Path]) -> None:
    corpus = load(shards)
    student = with_offsets(target, corpus)
    batch = collate(corpus, [3])
    lm = load_draft(draft, target_parts(target).embeddings)
    assert lm.vocab_ids is not None
    assert lm.vocab_ids.tolist() == student.vocab_ids.tolist()
    logits = lm.open(64).extend(batch.ids[0], keep=batch.ids.shape[1])[batch.rows]
    with torch.no_grad():
        expected = student(batch)
    assert (logits - expected).abs().mean() < 0.03 * expected.std()  # 8-bit weights
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.95


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "int8"), ("int8", "int8"), ("float32", "float32")])
def test_beside_a_target_of_few_bits_the_draft_reads_8(
    target: Path, draft: Path, shards: list[Path], dtype: str, precision: str
) -> None:
    pair = load_fitting(str(target), str(draft), device="cpu", dtype=dtype)
    assert isinstance(pair.draft, LeanLM)
    assert pair.plan is not None
    assert pair.plan.draft_kept is not None
    assert (pair.target.precision, pair.draft.precision) == (dtype, precision)
    assert pair.plan.draft_kept.precision == precision
    batch = collate(load(shards), [3])
    logits = pair.draft.open(64).extend(batch.ids[0], keep=batch.ids.shape[1])[batch.rows]
    with torch.no_grad():
        expected = with_offsets(target, load(shards))(batch)
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9


def test_a_plain_folder_is_the_same_draft(target: Path, draft: Path, shards: list[Path], tmp_path: Path) -> None:
    export_plain(draft, target, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = collate(load(shards), [3]).ids[0]
    lm = load_draft(draft, target_parts(target).embeddings)
    ours = lm.open(64).extend(ids, keep=len(ids))
    with torch.no_grad():
        theirs = model(input_ids=ids[None]).logits[0]
    assert theirs.shape[1] == len(SPECIAL) + WORDS
    assert lm.vocab_ids is not None
    torch.testing.assert_close(theirs[:, lm.vocab_ids], ours, atol=0.05, rtol=0.02)
    outside = torch.ones(theirs.shape[1], dtype=torch.bool)
    outside[lm.vocab_ids] = False
    assert theirs.softmax(-1)[:, outside].sum(-1).max() < 1e-3
    assert PreTrainedTokenizerFast.from_pretrained(tmp_path).chat_template == TEMPLATE


def test_damaged_and_foreign_drafts_are_refused_in_one_sentence(target: Path, draft: Path, tmp_path: Path) -> None:
    embeddings = target_parts(target).embeddings
    assert is_draft_folder(draft)
    assert not is_draft_folder(target)
    with pytest.raises(ModelUnavailable, match="made for tiny"):
        load_draft(draft, embeddings.flip(0))
    (tmp_path / CONFIG).write_bytes((draft / CONFIG).read_bytes())
    data = bytearray((draft / WEIGHTS).read_bytes())
    data[-5] ^= 1
    (tmp_path / WEIGHTS).write_bytes(bytes(data))
    with pytest.raises(ModelUnavailable, match="damaged"):
        read_draft(tmp_path)
    (tmp_path / WEIGHTS).unlink()
    with pytest.raises(ModelUnavailable, match="damaged"):
        read_draft(tmp_path)


# The command


RUN = """
import argparse, sys
from specdemo.distill import command
parser = argparse.ArgumentParser()
command.add_arguments(parser)
sys.exit(command.run(parser.parse_args()))
"""


def arguments(target: Path, out: Path, *more: str) -> list[str]:
    return [
        *("--target", str(target), "--out", str(out), "--vocab", "80", "--tokens", "3000", "--slots", str(SLOTS)),
        *("--steps", "50", "--learning-rate", "4e-3", "--checkpoint-seconds", "0.4", "--device", "cpu", *more),
    ]


def run(*args: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.run(parser.parse_args(args))


@pytest.mark.process
def test_a_killed_run_goes_on(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    log = out / "work" / "log.jsonl"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments(target, out)], env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None and len(lines_of(log)) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.communicate()[1] is not None
    assert process.returncode == -signal.SIGKILL
    before = lines_of(log)
    assert not is_draft_folder(out)
    with pytest.raises(BadRequest, match="--resume"):
        run(*arguments(target, out))
    with pytest.raises(BadRequest, match="--layers was 2"):
        run(*arguments(target, out, "--resume", "--layers", "1"))
    plain, prompts = tmp_path / "plain", tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "w3 w3 w3 w3 w3"}\n', encoding="utf-8")
    more = ("--resume", "--export-plain", str(plain), "--exclude", str(prompts))
    assert run(*arguments(target, out, *more)) == 0
    after = lines_of(log)
    assert after[: len(before)] == before
    assert [line["step"] for line in after].count(0) == 1, "training began anew"
    steps = [line["step"] for line in after]
    assert steps == sorted(steps)
    assert after[-1]["agreement"] > after[0]["agreement"] + 0.2
    assert steps[-1] == 50
    assert load_draft(out, target_parts(target).embeddings).vocab_size == 80
    assert AutoModelForCausalLM.from_pretrained(plain).config.num_hidden_layers == 2
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "80 of its\n93 ids" in card
    assert "Of the 1 prompts of the evaluation suite, 0 occur in it." in card


def lines_of(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_a_finished_draft_is_only_exported(target: Path, draft: Path, tmp_path: Path) -> None:
    assert run("--target", str(target), "--out", str(draft), "--export-plain", str(tmp_path)) == 0
    assert (tmp_path / "model.safetensors").is_file()
    assert not (draft / "work").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--layers", "0"], "--layers 0 is too small"),
        (["--minutes", "0"], "above 0"),
        (["--data", "missing.npz"], "no file missing.npz"),
    ],
)
def test_bad_arguments_are_named(target: Path, tmp_path: Path, more: list[str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        run(*arguments(target, tmp_path / "out", *more))
    assert not (tmp_path / "out").exists()


def test_a_recipe_is_a_value() -> None:
    assert replace(Recipe(minutes=1), seed=3) != Recipe(minutes=1)
