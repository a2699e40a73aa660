import math

import pytest

from moonlet.core.errors import ConfigError
from moonlet.train.guard import LossGuard, TrainingDiverged
from moonlet.train.schedule import CosineSchedule


def test_warm_up_peak_middle_and_floor() -> None:
    schedule = CosineSchedule(peak_lr=1.0, total_steps=1000)
    assert schedule.warmup_steps == 10
    assert schedule.lr(1) == pytest.approx(0.1)
    assert schedule.lr(10) == pytest.approx(1.0)
    assert schedule.lr(505) == pytest.approx(0.55)
    assert schedule.lr(1000) == pytest.approx(0.1)
    assert schedule.lr(2000) == pytest.approx(0.1)
    rates = [schedule.lr(step) for step in range(10, 1001)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    "change",
    [{"peak_lr": 0.0}, {"total_steps": 0}, {"warmup_fraction": 1.0}, {"floor_ratio": 1.5}],
)
def test_bad_values_are_refused(change: dict[str, float]) -> None:
    values = {"peak_lr": 1.0, "total_steps": 10, **change}
    with pytest.raises(ConfigError, match=next(iter(change))):
        CosineSchedule(**values)


def test_guard_refuses_spikes_and_learns_from_healthy_steps_only() -> None:
    guard = LossGuard()
    assert guard.accept(2.0)
    assert guard.accept(2.9)
    mean = guard.mean
    assert mean == pytest.approx(0.98 * 2.0 + 0.02 * 2.9)
    assert not guard.accept(1.51 * mean)
    assert not guard.accept(math.nan)
    assert not guard.accept(math.inf)
    assert guard.mean == mean
    assert guard.accept(2.0)
    assert guard.skips_in_a_row == 0
    assert guard.total_skips == 3


def test_guard_gives_up_after_five_skips() -> None:
    guard = LossGuard()
    guard.accept(1.0)
    for _ in range(4):
        assert not guard.accept(10.0)
    with pytest.raises(TrainingDiverged, match="5 steps in a row"):
        guard.accept(10.0)


def test_guard_state_round_trips() -> None:
    guard = LossGuard()
    guard.accept(1.0)
    guard.accept(math.nan)
    other = LossGuard()
    other.restore(guard.state())
    assert other == guard
