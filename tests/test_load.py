"""The load that strangers are, in short: `app.py --public` with the embedded pair, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import load


@pytest.mark.embedded
def test_the_public_page_stands_a_little_of_everything(
    embedded_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [name for name in load.PARTS if name != "conversion"]  # which takes minutes, and has tests of its own
    code = load.main(
        ["--short", "--target", "embedded", "--parts", ",".join(parts), "--out", str(tmp_path / "load.json")]
    )
    said = capsys.readouterr().out
    assert code == 0, said
    found = json.loads((tmp_path / "load.json").read_text(encoding="utf-8"))
    assert json.loads(said.splitlines()[-1]) == found
    assert list(found["parts"]) == parts
    crowd = found["parts"]["crowd"]
    assert crowd["results"] >= 21  # the one who races and the twenty who wait
    assert crowd["results"] + crowd["refused"] == crowd["visitors"] == 28
    assert found["parts"]["killed"]["left"] == 0
    assert found["prompt_in_log"] is False
    assert found["sigterm_s"] < 5


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        ('{"k":"done","ok":true}', "result"),
        ("The line is full (20 people are waiting).", "refused: line is full"),
        ("Your network has 10 people in line already.", "refused: in line already"),
        ("Queue is full. Max size is 80", "refused: Queue is full"),
        ('{"k":"done","ok":false}', 'failed: {"k":"done","ok":false}'),
    ],
)
def test_what_a_visitor_got_is_told_apart(told: str, outcome: str) -> None:
    assert load.outcome_of(told) == outcome


def test_an_unknown_part_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load.main(["--parts", "crowd,storm"])
    assert "storm" in capsys.readouterr().err.splitlines()[-1]
