"""The named pairs and the sizes that are committed for them: complete, sourced, and equal to what was published."""

from __future__ import annotations

import pytest

from specdemo.errors import BadRequest
from specdemo.plan.shape import shape_from
from specdemo.presets import PRESETS, find, known_configs

PUBLISHED = [name for name, config in known_configs().items() if "published_parameters" in config]
GATED_OWNERS = {"meta-llama", "google", "mistralai"}


def test_every_pair_can_be_planned_without_the_hub() -> None:
    for preset in PRESETS.values():
        if preset.name != "embedded":
            assert {preset.target, preset.draft} <= set(known_configs()), preset.name


def test_every_size_has_a_source_and_nothing_is_there_for_no_pair() -> None:
    used = {name for preset in PRESETS.values() for name in (preset.target, preset.draft)}
    for name, config in known_configs().items():
        assert len(config["source"]) > 10, name
        assert name in used, name


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_sizes_add_up_to_the_published_count(name: str) -> None:
    config = known_configs()[name]
    assert shape_from(name, config, lean=True).parameters == config["published_parameters"]
    assert config["published_in"]


def test_most_counts_are_published_and_the_others_have_the_size_in_their_name() -> None:
    assert len(PUBLISHED) >= 20
    billions = {"CodeLlama-34b": 33.7, "CodeLlama-7b": 6.7, "Mistral-Large": 123}
    for name in set(known_configs()) - set(PUBLISHED):
        expected = next(size for part, size in billions.items() if part in name)
        shape = shape_from(name, known_configs()[name], lean=True)
        assert shape.parameters / 1e9 == pytest.approx(expected, rel=0.01)


def test_gated_pairs_say_how_to_get_access() -> None:
    for preset in PRESETS.values():
        assert preset.gated == (preset.target.split("/")[0] in GATED_OWNERS), preset.name
        if preset.gated:
            assert "hf auth login" in preset.access


def test_a_name_that_is_no_pair_is_told_the_names_that_are() -> None:
    assert find("llama-3-70b-8b").draft == "meta-llama/Meta-Llama-3-8B-Instruct"
    with pytest.raises(BadRequest, match=r"no pair 'llama-3'.*codellama-34b-7b"):
        find("llama-3")
