"""The solver and the grid, held to their definitions: brute force in numpy, without Cholesky and without blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edged.errors import CheckpointError
from edged.quantize.gptq import QuantizedWeight, quantize_weight
from edged.quantize.grid import find_grid
from edged.quantize.recipe import Recipe
from edged.quantize.smoothing import find_scales

GROUP = 8


def case(seed: int, outputs: int, inputs: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """A weight ``[N, K]`` and correlated inputs ``[T, K]`` of unequal size."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((3 * inputs, inputs)) @ random.standard_normal((inputs, inputs))
    return random.standard_normal((outputs, inputs)), mixed * random.uniform(0.1, 3, inputs)


def solve(weight: np.ndarray[Any, Any], x: np.ndarray[Any, Any], recipe: Recipe) -> QuantizedWeight:
    return quantize_weight(torch.from_numpy(weight.copy()), torch.from_numpy(x.T @ x), recipe, "m")


def brute_force(
    weight: np.ndarray[Any, Any],
    hessian: np.ndarray[Any, Any],
    made: QuantizedWeight,
    order: list[int],
    damping: float,
) -> np.ndarray[Any, Any]:
    """Optimal brain quantization in a given order: after each column the inverse Hessian loses its row and column."""
    weight, hessian = weight.copy(), hessian.copy()
    hessian[np.diag_indices_from(hessian)] += damping * np.trace(hessian) / len(hessian)
    inverse = np.linalg.inv(hessian)
    numbers = np.zeros_like(weight)
    scales, zeros = made.grid.scales.numpy(), made.grid.zeros.numpy()
    left = list(order)
    for column in order:
        group = int(made.groups[column])
        scale, zero = scales[:, group], zeros[:, group]
        numbers[:, column] = np.clip(np.rint(weight[:, column] / scale) + zero, 0, 15)
        error = weight[:, column] - scale * (numbers[:, column] - zero)
        left.remove(column)
        weight[:, left] -= np.outer(error / inverse[column, column], inverse[column, left])
        inverse -= np.outer(inverse[:, column], inverse[column]) / inverse[column, column]
    return numbers


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    groups=st.sampled_from([1, 3, 17, 20]),
    act_order=st.sampled_from(["static", "free", "none"]),
    symmetric=st.booleans(),
)
def test_numbers_are_those_of_the_definition(seed, groups, act_order, symmetric):
    inputs = GROUP * groups
    weight, x = case(seed, 5, inputs)
    recipe = Recipe(group=GROUP, act_order=act_order, symmetric=symmetric)
    made = solve(weight, x, recipe)
    hessian = x.T @ x
    order = (
        list(range(inputs)) if act_order == "none" else np.argsort(-np.diag(hessian), kind="stable").tolist()
    )
    expected = brute_force(weight, hessian, made, order, recipe.damping)
    assert np.array_equal(made.numbers.numpy(), expected)
    groups_of = np.empty(inputs, int)
    groups_of[order if act_order == "free" else list(range(inputs))] = np.arange(inputs) // GROUP
    assert made.groups.tolist() == groups_of.tolist()
    scales, zeros = made.grid.scales.numpy()[:, groups_of], made.grid.zeros.numpy()[:, groups_of]
    assert np.array_equal(made.dense.numpy(), scales * (expected - zeros))
    assert np.array_equal(scales, scales.astype(np.float16))
    assert (zeros == 8).all() if symmetric else ((zeros >= 1) & (zeros <= 15)).all()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), symmetric=st.booleans(), shift=st.sampled_from([0.0, 3.0, -3.0]))
def test_the_grid_has_the_least_error_of_all_ranges(seed, symmetric, shift):
    random = np.random.default_rng(seed)
    weight = random.standard_normal((3, 2 * GROUP)) + shift
    importance = random.uniform(0, 2, 2 * GROUP)
    grid = find_grid(
        torch.from_numpy(weight), GROUP, symmetric=symmetric, importance=torch.from_numpy(importance)
    )
    for output in range(3):
        for group in range(2):
            own = slice(group * GROUP, (group + 1) * GROUP)
            w, count = weight[output, own], importance[own]

            def error(scale: float, zero: float, w=w, count=count) -> float:
                q = np.clip(np.rint(w / scale) + zero, 0, 15)
                return float((count * (scale * (q - zero) - w) ** 2).sum())

            best = np.inf
            for step in range(16):
                kept = 1 - step / 32
                if symmetric:
                    scale, zero = float(np.float16(abs(w).max() * kept / 7)), 8.0
                else:
                    low, high = min(w.min(), 0), max(w.max(), 0)
                    scale = float(np.float16((high - low) * kept / 15))
                    zero = float(np.clip(np.rint(-low * kept / scale), 1, 15))
                best = min(best, error(scale, zero))
            found = error(float(grid.scales[output, group]), float(grid.zeros[output, group]))
            assert found == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("act_order", ["static", "free", "none"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_the_outputs_are_nearer_than_those_of_rounding(act_order, symmetric):
    for seed in range(5):
        weight, x = case(seed, 24, 256)
        recipe = Recipe(group=64, act_order=act_order, symmetric=symmetric)
        exact = x @ weight.T
        errors = [
            np.linalg.norm(x @ solve(weight, x, each).dense.numpy().T - exact)
            for each in (recipe, replace(recipe, method="rtn"))
        ]
        assert errors[0] < 0.8 * errors[1]


def test_an_input_that_never_moves_is_rounded_by_itself():
    weight, x = case(1, 4, 16)
    x[:, [3, 9]] = 0
    made = solve(weight, x, Recipe(group=8))
    scales = made.grid.scales.numpy()[:, np.arange(16) // 8]
    for column in (3, 9):
        expected = np.clip(np.rint(weight[:, column] / scales[:, column]) + 8, 0, 15)
        assert np.array_equal(made.numbers.numpy()[:, column], expected)


@pytest.mark.parametrize("symmetric", [True, False])
def test_groups_of_zeros_stay_zeros(symmetric):
    weight, _ = case(2, 4, 16)
    weight[:, 8:] = 0
    made = quantize_weight(torch.from_numpy(weight), None, Recipe("rtn", group=8, symmetric=symmetric), "m")
    assert (made.dense[:, 8:] == 0).all()
    assert made.dense.isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w, x: w.__setitem__((0, 0), np.inf), "layers.3.down: the weights hold NaN or infinity"),
        (lambda w, x: x.__setitem__((0, 0), np.nan), "layers.3.down: its inputs hold NaN or infinity"),
        (
            lambda w, x: w.__setitem__((0, 0), 1e7),
            "layers.3.down: holds weights that 4 bits with a float16 scale",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(change, message):
    weight, x = case(3, 4, 16)
    change(weight, x)
    with pytest.raises(CheckpointError, match=message):
        quantize_weight(torch.from_numpy(weight), torch.from_numpy(x.T @ x), Recipe(group=8), "layers.3.down")


def test_a_singular_hessian_is_damped_until_it_has_an_inverse():
    weight = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    x = np.ones((1, 16), np.float32) * np.float32(1e3)
    made = quantize_weight(
        torch.from_numpy(weight), torch.from_numpy(x.T @ x), Recipe(group=8, damping=1e-12), "m"
    )
    assert made.dense.isfinite().all()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32), tied=st.sampled_from([1, 2]))
def test_smoothing_scales_have_the_least_error(seed, tied):
    weight, x = case(seed, 6, 16)
    activation = np.abs(x).mean(axis=0)
    recipe = Recipe("awq-gptq", group=8)

    def ties(scales: torch.Tensor) -> torch.Tensor:
        return scales.view(-1, tied).amax(dim=1, keepdim=True).expand(-1, tied).reshape(-1)

    found = find_scales(
        torch.from_numpy(weight), torch.from_numpy(x.T @ x), torch.from_numpy(activation), recipe, ties
    ).numpy()

    def error(scales: np.ndarray[Any, Any]) -> float:
        scaled = weight * scales
        cut = scaled.reshape(6, 2, 8)
        step = (np.abs(cut).max(axis=2, keepdims=True) / 7).astype(np.float16).astype(np.float64)
        rounded = (np.clip(np.rint(cut / step), -8, 7) * step).reshape(6, 16)
        return float(np.linalg.norm(x @ (rounded / scales).T - x @ weight.T) ** 2)

    base = activation.reshape(-1, tied).max(axis=1).repeat(tied)
    candidates = [base**power for power in np.arange(20) / 20]
    errors = [error(each / np.sqrt(each.max() * each.min())) for each in candidates]
    assert error(found) == pytest.approx(min(errors), rel=1e-6)
    assert error(found) <= error(np.ones(16)) * (1 + 1e-9)


def test_without_outliers_at_the_first_positions_the_others_are_served_better():
    """What P-GPTQ is for: a few rows of inputs hundreds of times as large hide all others from the Hessian."""
    for seed in range(5):
        weight, x = case(seed, 24, 128)
        random = np.random.default_rng(seed)
        first = 300 * random.standard_normal((12, 128)) * np.abs(x).mean()
        recipe = Recipe(group=64)
        exact = x @ weight.T
        errors = [
            np.linalg.norm(x @ solve(weight, inputs, recipe).dense.numpy().T - exact)
            for inputs in (x, np.concatenate([first, x]))
        ]
        assert errors[0] < 0.9 * errors[1]
