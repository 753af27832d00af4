"""The package as a library: what it promises is there, and importing it is cheap."""

from __future__ import annotations

import subprocess
import sys

import pytest

import specdemo


def test_every_promised_name_is_there() -> None:
    assert set(specdemo.__all__) == set(specdemo._HOME)
    for name in specdemo.__all__:
        assert getattr(specdemo, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(specdemo, "no_such_name")


@pytest.mark.process
def test_importing_the_package_imports_no_model_library() -> None:
    code = "import sys, specdemo; print(sorted({'torch', 'transformers', 'gradio'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
