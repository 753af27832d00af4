"""The page's text in every language: the same keys, the same blanks, truly translated; and the switch between them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from specdemo.ui import assets
from specdemo.ui.assets import LANGUAGES, SCRIPTS, strings

ROOT = Path(__file__).parents[1]
CJK = re.compile(r"[\u4e00-\u9fff]")
SSD = {"method_ssd", "lane_short_ssd", "compare_name_ssd"}
NOT_WORDS = {"title", "none", "state_idle", "stat_alpha", "top_p_label", *SSD}
"""Names and signs that are the same everywhere."""


def blanks(sentence: str) -> list[str]:
    return sorted(re.findall(r"\{(\w+)\}", sentence))


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_language_has_the_same_keys_in_the_same_order(language: str) -> None:
    assert list(strings(language)) == list(strings())


@pytest.mark.parametrize("language", LANGUAGES)
def test_no_key_is_written_twice(language: str) -> None:
    pairs: list[tuple[str, str]] = json.loads(assets.static(f"text.{language}.json"), object_pairs_hook=list)
    assert len({key for key, _ in pairs}) == len(pairs)
    assert all(isinstance(value, str) for _, value in pairs)


@pytest.mark.parametrize("language", LANGUAGES[1:])
def test_every_sentence_has_the_same_blanks(language: str) -> None:
    ours = strings()
    assert {key: blanks(text) for key, text in strings(language).items()} == {
        key: blanks(text) for key, text in ours.items()
    }


def test_the_chinese_text_is_chinese() -> None:
    english, chinese = strings(), strings("zh")
    assert {key for key, text in chinese.items() if not CJK.search(text)} == NOT_WORDS
    assert {key for key, text in english.items() if CJK.search(text)} == set()


def test_one_word_has_one_meaning() -> None:
    """The vocabulary of the field, the same in the legend, the statistics, the guide and the comparison."""
    chinese = strings("zh")
    for english, word in (
        ("speculative decoding", "推测解码"),
        ("draft model", "草稿模型"),
        ("acceptance rate", "接受率"),
        ("speedup", "加速比"),
    ):
        keys = [key for key, text in strings().items() if english in re.sub(r"\{\w+\}", "", text).lower()]
        assert keys, english
        assert [key for key in keys if word not in chinese[key]] == [], english


def test_every_sentence_of_the_server_that_is_translated_is_really_said() -> None:
    """The keys said_... are sentences of other modules: their words must stand there, or nobody would see them."""
    said = set()
    for path in (ROOT / "specdemo").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        said |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    for key, sentence in strings().items():
        if key.startswith("said_"):
            parts = [part for part in re.split(r"\{\w+\}", sentence) if len(part) > 2]
            assert [part for part in parts if not any(part in text for text in said)] == [], key


def test_no_script_has_words_of_its_own() -> None:
    """What a reader sees comes from the text files: no sentence stands in a script."""
    for name in (*SCRIPTS, "keep.js"):
        code = re.sub(r"//.*", "", assets.static(name))
        for literal in re.findall(r'"([^"\n]*)"', code):
            assert not re.search(r"[A-Z][a-z]+ [a-z]+ [a-z]+", literal), (name, literal)


def test_the_chinese_readme_keeps_up_with_the_english_one() -> None:
    """The same commands and the same figures, so that a change of one is missed in neither."""
    english, chinese = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh.md"))
    english = english.split("---", 2)[2]

    def commands(text: str) -> list[str]:
        blocks = re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)
        lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
        return [line for line in lines if line.startswith((".venv", "python ", "make ", "from ", "pair", "prompt_ids"))]

    assert set(commands(english)) <= set(commands(chinese))
    links = re.compile(r"\]\(([^)#]+)\)")
    assert set(links.findall(english)) <= {*links.findall(chinese), "README.zh.md"}
    figures = re.compile(r"\b\d\.\d\d\b")
    assert set(figures.findall(english)) <= set(figures.findall(chinese))
