"""The compiled attention, against one written out in double precision."""

from __future__ import annotations

import pytest
import torch

from specdemo.models.few_queries import attend_few
from specdemo.models.linear import kernel_obstacle

pytestmark = pytest.mark.skipif(kernel_obstacle() is not None, reason=f"needs {kernel_obstacle()}")

POSITIONS = 256
SHAPES = [(64, 3, 3), (16, 2, 1), (128, 1, 7), (24, 4, 2), (8, 1, 1)]  # head_dim, kv_heads, groups


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def table_of(width: int) -> torch.Tensor:
    """Rotations by position; of two kinds, of which the second must not matter."""
    angles = drawn(POSITIONS, 2, width // 2, seed=4) * 3
    return torch.polar(1 + angles.abs() / 9, angles)


def written_out(
    rows: torch.Tensor, memory: torch.Tensor, start: int, table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the rows read, [n, groups * kv_heads * head_dim], and the memory afterwards."""
    count, parts, heads, width = rows.shape
    groups, rows, memory = parts - 2, rows.double(), memory.double()
    if table is not None:
        turns = table[start : start + count, 0, None, None].to(torch.complex128)
        turned = torch.view_as_complex(rows[:, : groups + 1].unflatten(-1, (-1, 2)).contiguous()) * turns
        rows = torch.cat([torch.view_as_real(turned).flatten(-2), rows[:, groups + 1 :]], 1)
    memory[:, :, start : start + count] = rows[:, groups:].permute(1, 2, 0, 3)
    attended = torch.empty(count, groups, heads, width, dtype=torch.double)
    for row in range(count):
        keys, values = memory[:, :, : start + row + 1]
        for group in range(groups):
            scores = torch.einsum("hpd,hd->hp", keys, rows[row, group]) / width**0.5
            attended[row, group] = torch.einsum("hp,hpd->hd", scores.softmax(1), values)
    return attended.flatten(1), memory


@pytest.mark.parametrize(("width", "heads", "groups"), SHAPES)
@pytest.mark.parametrize("start", [0, 3, 61, 64, 200, POSITIONS - 9])
@pytest.mark.parametrize("rotated", [True, False])
def test_it_rotates_writes_and_attends(width: int, heads: int, groups: int, start: int, rotated: bool) -> None:
    table = table_of(width) if rotated else None
    rows, memory = drawn(9, groups + 2, heads, width, seed=1), drawn(2, heads, POSITIONS, width, seed=2)
    expected, written = written_out(rows, memory, start, table)
    attended = attend_few(rows, memory, start, table)
    torch.testing.assert_close(attended.double(), expected, rtol=1e-5, atol=4e-6)
    torch.testing.assert_close(memory.double(), written, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("width", "heads", "groups"), SHAPES)
def test_a_position_has_the_same_bits_in_any_company(width: int, heads: int, groups: int) -> None:
    table, rows = table_of(width), drawn(24, groups + 2, heads, width, seed=1)
    results = []
    for count in (1, 2, 3, 5, 24):
        memory = drawn(2, heads, POSITIONS, width, seed=2)
        starts = range(50, 74, count)
        parts = [attend_few(part, memory, at, table) for at, part in zip(starts, rows.split(count), strict=True)]
        results.append((torch.cat(parts), memory))
    for attended, memory in results[1:]:
        assert torch.equal(attended, results[0][0])
        assert torch.equal(memory, results[0][1])


def test_what_stands_behind_a_position_is_never_read() -> None:
    """Old keys and values of a longer run, whatever they are."""
    rows, table = drawn(5, 5, 3, 64, seed=1), table_of(64)
    memory = drawn(2, 3, POSITIONS, 64, seed=2)
    expected = attend_few(rows, memory.clone(), 70, table)
    memory[:, :, 75:] = float("nan")
    assert torch.equal(attend_few(rows, memory, 70, table), expected)


def test_scores_of_any_size_have_a_softmax() -> None:
    rows, memory = drawn(2, 3, 1, 8, seed=1) * 1e4, drawn(2, 1, 16, 8, seed=2)
    expected, _ = written_out(rows, memory, 8, None)
    torch.testing.assert_close(attend_few(rows, memory, 8, None).double(), expected, rtol=1e-5, atol=1e-5 * 1e4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_key_that_is_not_finite_spoils_the_positions_that_read_it_and_no_other(value: float) -> None:
    """A broken model is told by its logits, so the softmax must not make numbers of what is none."""
    rows, memory = drawn(9, 5, 3, 64, seed=1), drawn(2, 3, POSITIONS, 64, seed=2)
    expected = attend_few(rows, memory.clone(), 50, None)
    rows[4, 3] = value  # the keys of one new position; its values are finite
    attended = attend_few(rows, memory, 50, None)
    assert torch.equal(attended[:4], expected[:4])
    assert attended[4:].isnan().any(1).all()
