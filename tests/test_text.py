"""Text made token by token is the text that the tokenizer makes of all of them, and never half a character."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_level_tokenizer, sentencepiece_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from specdemo.errors import BadRequest
from specdemo.text import TokenText, encode_prompt

SAMPLES = [
    "Hello, world! It's 12:30.",
    "  two spaces,   three, \t a tab,\n\n\tand lines\r\n end ",
    "naïve café — “quotes” … ½",
    "日本語のテキスト、漢字と仮名。",
    "😀😀👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 ع ق हि न्दी",
    "a genuine \ufffd replacement \ufffd\ufffd character",
    "def f(x):\n    return {'a': x ** 2}\n",
    " leading",
    "\n",
    " ",
]
CORPUS = [*SAMPLES, "the quick brown fox jumps over the lazy dog. The answer is there, and here it is."] * 3


def trained_byte_level() -> Any:
    """A byte-level BPE with merges, so that tokens are pieces of words and some are pieces of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|user|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:12], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentencepiece() -> Any:
    return sentencepiece_tokenizer(["▁the", "▁Hello", "▁it", "▁is", "▁a", ",", ".", "!", "▁▁", "語", "\ufffd", "é"])


TOKENIZERS = {"byte level": trained_byte_level(), "sentencepiece": sentencepiece()}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def stream(text: TokenText, ids: Sequence[int]) -> list[str]:
    """What each token adds, and the flush."""
    detokenizer = text.detokenizer()
    return [*(detokenizer.push(id) for id in ids), detokenizer.flush()]


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


# Equal to the tokenizer's decode


@each_tokenizer
@pytest.mark.parametrize("sample", SAMPLES)
def test_pitfall_23_streamed_text_is_the_decoded_text(tokenizer: Any, sample: str) -> None:
    ids = encoded(tokenizer, sample)
    assert tokenizer.decode(ids) == sample  # the tokenizers made here lose nothing
    assert "".join(stream(TokenText(tokenizer), ids)) == sample


@each_tokenizer
@given(st.lists(st.sampled_from(SAMPLES) | st.text(max_size=12), max_size=4))
@settings(max_examples=60, deadline=None)
def test_pitfall_23_any_text_survives_streaming(tokenizer: Any, parts: list[str]) -> None:
    sample = "".join(parts)
    ids = encoded(tokenizer, sample)
    assert "".join(stream(TokenText(tokenizer), ids)) == tokenizer.decode(ids) == sample


def test_any_ids_of_a_byte_level_vocabulary_read_as_the_tokenizer_decodes_them() -> None:
    """Also bytes that are no UTF-8: a model can produce anything."""
    tokenizer, generator = TOKENIZERS["byte level"], random.Random(0)
    text = TokenText(tokenizer)
    for length in [1, 2, 3, 5, 8, 20] * 40:
        ids = [generator.randrange(2, len(tokenizer)) for _ in range(length)]
        assert "".join(stream(text, ids)) == tokenizer.decode(ids)


def test_any_words_and_characters_of_a_sentencepiece_vocabulary_read_as_decoded() -> None:
    tokenizer, generator = TOKENIZERS["sentencepiece"], random.Random(0)
    text = TokenText(tokenizer)
    pieces = [[id] for token, id in tokenizer.get_vocab().items() if not token.startswith("<")]
    pieces += [encoded(tokenizer, char)[1:] for char in "😀語é漢\n€ع"]  # without the word boundary in front
    for length in [1, 2, 3, 5, 8, 20] * 40:
        ids = [id for _ in range(length) for id in generator.choice(pieces)]
        assert "".join(stream(text, ids)) == tokenizer.decode(ids)


# Never half a character


@each_tokenizer
@pytest.mark.parametrize("sample", ["😀", "a😀b", "語語語語漢漢漢漢", "😀😀😀👩‍👩‍👧‍👦🏳️‍🌈", "é€😀é€😀é€😀"])
def test_pitfall_22_no_half_characters_are_shown(tokenizer: Any, sample: str) -> None:
    added = stream(TokenText(tokenizer), encoded(tokenizer, sample))
    assert "\ufffd" not in "".join(added)
    assert "".join(added) == sample
    assert added[-1] == ""  # nothing was left to flush


def test_pitfall_22_a_character_comes_with_its_last_byte() -> None:
    tokenizer = byte_level_tokenizer([b"\xf0", b"\x9f\x98", b"\x80!", b"a"])
    assert stream(TokenText(tokenizer), [0, 1, 2, 3]) == ["", "", "😀!", "a", ""]


@each_tokenizer
def test_pitfall_22_a_genuine_replacement_character_passes_at_once(tokenizer: Any) -> None:
    text = TokenText(tokenizer)
    ids = encoded(tokenizer, "a\ufffd\ufffd\ufffdb")
    detokenizer = text.detokenizer()
    seen = ""
    for i, id in enumerate(ids, start=1):
        seen += detokenizer.push(id)
        if tokenizer.decode(ids[i:]) in ("b", "\ufffdb", "\ufffd\ufffdb", "\ufffd\ufffd\ufffdb"):
            assert seen == tokenizer.decode(ids[:i])
    assert seen == "a\ufffd\ufffd\ufffdb"


def test_pitfall_22_a_word_piece_for_the_replacement_character_is_not_held_back() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    id = tokenizer.convert_tokens_to_ids("\ufffd")
    assert stream(TokenText(tokenizer), [id, id]) == ["\ufffd", "\ufffd", ""]


@each_tokenizer
def test_pitfall_22_what_stays_incomplete_is_flushed_at_the_end(tokenizer: Any) -> None:
    text = TokenText(tokenizer)
    ids = encoded(tokenizer, "a漢")
    added = stream(text, ids[:-1])
    assert "".join(added[:-1]) == "a"
    assert added[-1] == "\ufffd"
    detokenizer = text.detokenizer()
    for id in ids[:-1]:
        detokenizer.push(id)
    detokenizer.flush()
    assert detokenizer.flush() == ""


def test_pitfall_22_bytes_that_never_become_a_character_do_not_stall_the_stream() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    broken = tokenizer.convert_tokens_to_ids("<0x80>")
    word = tokenizer.convert_tokens_to_ids("▁the")
    added = stream(TokenText(tokenizer), [broken] * 6 + [word])
    assert "".join(added[:-1]).endswith(" the")
    assert "\ufffd" in "".join(added[:5])


def test_pitfall_22_half_a_character_that_a_word_cuts_off_stands_before_the_word() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(["▁it", "<0xE6>", "<0xBC>", "▁the"])
    assert stream(TokenText(tokenizer), ids) == ["it", "", "", "\ufffd the", ""]


# Spaces, newlines, special tokens


@pytest.mark.parametrize("words", [["▁the", "▁the"], ["▁▁", "▁the"], ["▁the", "▁▁", ","]])
def test_pitfall_23_sentencepiece_keeps_spaces_between_words_and_strips_only_the_first(words: list[str]) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = tokenizer.convert_tokens_to_ids(words)
    assert "".join(stream(TokenText(tokenizer), ids)) == "".join(words).replace("▁", " ")[1:]


def test_pitfall_23_tokens_of_white_space_alone_add_their_white_space() -> None:
    tokenizer = byte_level_tokenizer(["a", " ", "\n", "\n\n", "\t", " b"])
    assert stream(TokenText(tokenizer), [0, 1, 2, 3, 4, 1, 5]) == ["a", " ", "\n", "\n\n", "\t", " ", " b", ""]


@each_tokenizer
def test_special_tokens_add_nothing_and_read_by_name_alone(tokenizer: Any) -> None:
    text = TokenText(tokenizer)
    special = min(text.special_ids)
    ids = encoded(tokenizer, "a b")
    assert "".join(stream(text, [special, *ids[:1], special, *ids[1:], special])) == "a b"
    assert text.piece(special) == tokenizer.convert_ids_to_tokens(special)


def test_a_special_token_inside_a_character_does_not_break_it() -> None:
    text = TokenText(byte_level_tokenizer([b"\xc3", b"\xa9"], special=["<s>"]))
    assert "".join(stream(text, [1, 0, 2])) == "é"


def test_added_tokens_that_are_not_special_are_text() -> None:
    tokenizer = byte_level_tokenizer(["a", "b"])
    tokenizer.add_tokens(["<think>"])
    assert "".join(stream(TokenText(tokenizer), [0, 2, 1])) == tokenizer.decode([0, 2, 1]) == "a<think>b"


def test_pitfall_10_ids_past_the_tokenizers_end_have_no_text() -> None:
    for tokenizer in TOKENIZERS.values():
        text = TokenText(tokenizer)
        assert stream(text, [len(tokenizer) + 5]) == ["", ""]
        assert text.piece(len(tokenizer) + 5) == ""


@each_tokenizer
def test_a_piece_is_the_token_with_its_space(tokenizer: Any) -> None:
    text = TokenText(tokenizer)
    ids = encoded(tokenizer, "it is the answer")
    assert "".join(text.piece(id) for id in ids).strip() == "it is the answer"
    assert any(text.piece(id).startswith(" ") for id in ids)
    assert text.piece(encoded(tokenizer, "漢")[-1]) == "\ufffd"


def test_clean_up_of_spaces_is_not_applied() -> None:
    """Some tokenizers' decode draws "it ' s" together; what was generated is shown."""
    vocab = {"[UNK]": 0, "it": 1, "'": 2, "s": 3, "##n": 4, "do": 5, "t": 6, ".": 7}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    assert "".join(stream(TokenText(fast), [5, 4, 2, 6, 1, 2, 3, 7])) == "don ' t it ' s ."


# Forks


@each_tokenizer
@pytest.mark.parametrize("sample", ["a漢 is", "😀😀", "it is the"])
def test_a_fork_goes_its_own_way(tokenizer: Any, sample: str) -> None:
    text = TokenText(tokenizer)
    ids = encoded(tokenizer, sample)
    for at in range(len(ids) + 1):
        original, seen = text.detokenizer(), ""
        for id in ids[:at]:
            seen += original.push(id)
        fork = original.fork()
        refused = [fork.push(id) for id in encoded(tokenizer, "漢 it")[:-1]]
        refused.append(fork.flush())
        for id in ids[at:]:
            seen += original.push(id)
        assert seen + original.flush() == sample


def test_a_fork_continues_from_where_it_was_made() -> None:
    text = TokenText(byte_level_tokenizer([b"\xc3", b"\xa9", b"\xa8"]))
    original = text.detokenizer()
    assert original.push(0) == ""
    assert original.fork().push(2) == "è"
    assert original.push(1) == "é"


# Prompts


def with_template(template: str | None, bos: bool = True) -> Any:
    special = ["<s>", "</s>", "<|user|>"]
    tokenizer = byte_level_tokenizer([bytes([byte]) for byte in range(256)], special=special)
    backend = tokenizer.backend_tokenizer
    backend.model = models.BPE(backend.get_vocab(with_added_tokens=True), [])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if bos:
        from tokenizers.processors import TemplateProcessing

        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.bos_token = "<s>"
    tokenizer.chat_template = template
    return tokenizer


TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|user|>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}</s>{% endif %}"
)


def test_pitfall_14_a_template_that_begins_with_bos_gives_one_bos() -> None:
    tokenizer = with_template(TEMPLATE)
    ids = encode_prompt(tokenizer, "hi")
    assert tokenizer.decode(ids) == "<s><|user|>hi</s>"
    assert ids.count(0) == 1


def test_pitfall_14_a_model_without_template_gets_the_text_with_one_bos() -> None:
    tokenizer = with_template(None)
    ids = encode_prompt(tokenizer, "hi")
    assert tokenizer.decode(ids) == "<s>hi"
    assert encode_prompt(with_template(TEMPLATE), "hi", raw=True) == ids


def test_pitfall_14_a_model_without_bos_gets_none() -> None:
    tokenizer = with_template(None, bos=False)
    assert tokenizer.decode(encode_prompt(tokenizer, "hi")) == "hi"


@pytest.mark.parametrize("prompt", ["", "   ", "\n\t ", "\u3000"])
def test_pitfall_15_an_empty_prompt_is_refused(prompt: str) -> None:
    with pytest.raises(BadRequest, match="prompt is empty"):
        encode_prompt(with_template(None), prompt)


@pytest.mark.parametrize(("prompt", "complaint"), [("a\x00b", "NUL"), ("ab\ud83dc", "position 3")])
def test_pitfall_15_nul_and_lone_surrogates_are_refused_in_words(prompt: str, complaint: str) -> None:
    with pytest.raises(BadRequest, match=complaint):
        encode_prompt(with_template(None), prompt)


def test_pitfall_15_a_hundred_thousand_characters_are_encoded_whole() -> None:
    tokenizer = with_template(None)
    assert len(encode_prompt(tokenizer, "x" * 100_000)) == 100_001


# The embedded model's own tokenizer


@pytest.fixture(scope="module")
def embedded(embedded_folder: Path) -> TokenText:
    return TokenText(AutoTokenizer.from_pretrained(embedded_folder))


@pytest.mark.embedded
@pytest.mark.parametrize("sample", SAMPLES)
def test_the_embedded_tokenizer_streams_as_it_decodes(embedded: TokenText, sample: str) -> None:
    ids = encoded(embedded.tokenizer, sample)
    assert "".join(stream(embedded, ids)) == embedded.tokenizer.decode(ids) == sample


@pytest.mark.embedded
def test_any_ids_of_the_embedded_tokenizer_read_as_decoded(embedded: TokenText) -> None:
    generator = random.Random(0)
    ordinary = [id for id in range(len(embedded.tokenizer)) if id not in embedded.special_ids]
    for length in [1, 2, 3, 5, 8, 20] * 40:
        ids = generator.choices(ordinary, k=length)
        assert "".join(stream(embedded, ids)) == embedded.tokenizer.decode(ids)
