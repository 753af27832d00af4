"""The compiled products, against torch's in double precision and against integers computed by hand."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from specdemo.models.linear import kernel_obstacle
from specdemo.models.panels import INT8_MOST, PanelWeight

pytestmark = pytest.mark.skipif(kernel_obstacle() is not None, reason=f"needs {kernel_obstacle()}")

SHAPES = [(16, 8), (70, 54), (33, 63), (1, 1), (48, 16), (576, 200)]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_8_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = weight.abs().amax(1) / INT8_MOST
    return (weight / scales[:, None]).round().to(torch.int8), scales


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_16_bit_weights_are_multiplied_in_float32(outputs: int, inputs: int) -> None:
    weight = drawn(outputs, inputs).half()
    product = PanelWeight(weight).multiply(drawn(15, inputs, seed=1))
    expected = drawn(15, inputs, seed=1).double() @ weight.double().T
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-6 * inputs)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_8_bit_products_are_sums_of_integers(outputs: int, inputs: int) -> None:
    """Activations in steps of their row's largest / most, summed exactly: nothing else is rounded."""
    weight, scales = in_8_bits(drawn(outputs, inputs))
    rows = drawn(15, inputs, seed=1)
    most = min(32767, (2**31 - 1) // (INT8_MOST * inputs))
    largest = rows.abs().amax(1, keepdim=True)
    whole = (rows * (torch.tensor(float(most)) / largest)).round().double()
    assert whole.abs().max() == most
    expected = (whole @ weight.double().T) * (largest.double() / most) * scales.double()
    product = PanelWeight(weight, scales).multiply(rows)
    torch.testing.assert_close(product.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("inputs", [4, 1536, 40_000])
def test_the_largest_sums_fit_into_32_bits(inputs: int) -> None:
    weight = torch.full((16, inputs), INT8_MOST, dtype=torch.int8)
    weight[1::2] = -INT8_MOST
    rows = torch.ones(2, inputs)
    rows[1] = -1
    product = PanelWeight(weight, torch.ones(16)).multiply(rows)
    signs = torch.tensor([[1.0, -1.0] * 8, [-1.0, 1.0] * 8])
    torch.testing.assert_close(product, signs * INT8_MOST * inputs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", [16, 8])
def test_rows_of_zeros_and_of_any_size(bits: int) -> None:
    weight = drawn(40, 64)
    weight[3] = 0
    panels = PanelWeight(weight.half()) if bits == 16 else PanelWeight(*in_8_bits(weight.where(weight != 0, 1e-9)))
    rows = drawn(4, 64, seed=2) * torch.tensor([[0.0], [1e-12], [1e12], [1.0]])
    product = panels.multiply(rows)
    assert product[0].tolist() == [0.0] * 40
    exact = rows @ weight.T
    assert ((product - exact)[1:].norm(dim=1) < 0.02 * exact[1:].norm(dim=1)).all()
    alike = panels.multiply_normed(rows[1:] / rows[1:].norm(dim=1, keepdim=True), 0.0)
    torch.testing.assert_close(panels.multiply_normed(rows[3:], 0.0), alike[2:], rtol=0.01, atol=0.001)
    assert panels.multiply_normed(rows[:1], 1e-5).tolist() == [[0.0] * 40]


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_spoils_its_row_and_no_other(bits: int, value: float) -> None:
    """A broken model is told by its logits (see `acceptance`), so rounding must not make numbers of what is none."""
    weight = drawn(48, 64)
    panels = PanelWeight(weight.half()) if bits == 16 else PanelWeight(*in_8_bits(weight))
    rows = drawn(8, 64, seed=3)
    clean = panels.multiply(rows)
    rows[5, 7] = value
    product = panels.multiply(rows)
    assert not product[5].isfinite().any()
    others = [0, 1, 2, 3, 4, 6, 7]
    assert torch.equal(product[others], clean[others])
    assert not panels.multiply_normed(rows, 1e-5)[5].isfinite().all()


@pytest.mark.parametrize("bits", [16, 8])
def test_threads_of_python_multiply_at_the_same_time(bits: int) -> None:
    weight = drawn(320, 512)
    panels = PanelWeight(weight.half()) if bits == 16 else PanelWeight(*in_8_bits(weight))
    rows = [drawn(1 + index, 512, seed=index) for index in range(6)]
    expected = [panels.multiply(some) for some in rows]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(200):
            if not torch.equal(panels.multiply(rows[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong
