"""Closeness checks that say how far apart two tensors are, and where."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["assert_close", "assert_same_choice", "error_ratio"]


def error_ratio(actual: Tensor, expected: Tensor) -> float:
    """Return the root mean square of the difference over that of ``expected``.

    NaN anywhere gives infinity, so that a comparison with a bound fails.
    """
    difference = (actual.double() - expected.double()).square().mean().sqrt()
    scale = expected.double().square().mean().sqrt().clamp_min(1e-30)
    ratio = float(difference / scale)
    return ratio if ratio == ratio else float("inf")


def assert_close(
    actual: Tensor, expected: Tensor, *, atol: float, rtol: float = 0.0, what: str = "tensors"
) -> float:
    """Assert equal shapes and ``|actual - expected| <= atol + rtol |expected|`` everywhere.

    Returns:
        The largest absolute difference.

    Raises:
        AssertionError: Names the worst element and both values.
    """
    assert actual.shape == expected.shape, f"{what}: {actual.shape} against {expected.shape}"
    if not actual.numel():
        return 0.0
    left, right = actual.detach().double(), expected.detach().double()
    difference = (left - right).abs()
    excess = (difference - atol - rtol * right.abs()).nan_to_num(nan=torch.inf)
    worst = int(excess.argmax())
    place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), actual.shape))
    assert float(excess.flatten()[worst]) <= 0, (
        f"{what} differ at {place}: {float(left[place])} against {float(right[place])} "
        f"(atol {atol}, rtol {rtol})"
    )
    return float(difference.max())


def assert_same_choice(
    actual_QW: Tensor, expected_QW: Tensor, *, atol: float = 1e-4, margin: float = 1e-3
) -> None:
    """Assert close logits, and the same best id wherever the best two are apart by ``margin``."""
    assert_close(actual_QW, expected_QW, atol=atol, what="logits")
    best_two = expected_QW.topk(2, dim=-1).values
    is_clear = best_two[..., 0] - best_two[..., 1] > margin
    same = actual_QW.argmax(-1) == expected_QW.argmax(-1)
    assert bool((same | ~is_clear).all()), "the greedy choice differs on a clear row"
