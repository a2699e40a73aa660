"""References, bytes and order of eviction against a list of checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonlet.core.errors import ConfigError
from moonlet.engine.cache.external.ledger import Ledger
from tests.engine.external.chains import chain

UNIT_BYTES = 10
TEXTS = st.text(alphabet="ab", min_size=1, max_size=5)


class Model:
    """Checkpoints as a list, least recently used first; everything else recomputed."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.entries: list[tuple[tuple[bytes, ...], int]] = []

    def units(self) -> set[bytes]:
        return {unit for keys, _ in self.entries for unit in keys}

    def num_bytes(self) -> int:
        return len(self.units()) * UNIT_BYTES + sum(own for _, own in self.entries)

    def find(self, key: bytes) -> tuple[tuple[bytes, ...], int] | None:
        return next((entry for entry in self.entries if entry[0][-1] == key), None)


@given(
    st.integers(0, 160),
    st.lists(st.tuples(st.sampled_from("stdu"), TEXTS, st.integers(0, 40)), max_size=40),
)
def test_ledger_against_a_list(budget: int, steps: list[tuple[str, str, int]]) -> None:
    ledger, model = Ledger(budget, UNIT_BYTES), Model(budget)
    for action, text, own_bytes in steps:
        keys = chain(text)
        entry, before = model.find(keys[-1]), model.units()
        gone: list[bytes] = []
        freed = None
        if action == "s" and entry is None and ledger.fits(len(keys), own_bytes):
            had_room = ledger.has_room(keys, own_bytes)
            freed = ledger.reserve(keys, own_bytes)
            assert keys[-1] not in ledger
            assert ledger.publish(keys[-1])
            model.entries.append((keys, own_bytes))
            while model.num_bytes() > budget:
                gone.append(model.entries.pop(0)[0][-1])
            assert had_room == (not gone)
        elif action == "t" and entry is not None:
            ledger.touch(keys[-1])
            model.entries.remove(entry)
            model.entries.append(entry)
        elif action == "d":
            freed = ledger.remove(keys[-1])
            if entry is not None:
                model.entries.remove(entry)
                gone.append(keys[-1])
        elif action == "u":
            freed = ledger.remove_unit(keys[-1])
            gone = [entry[0][-1] for entry in model.entries if keys[-1] in entry[0]]
            model.entries = [entry for entry in model.entries if keys[-1] not in entry[0]]
        if freed is not None:
            assert freed.checkpoints == gone
            assert len(set(freed.units)) == len(freed.units)
            assert set(freed.units) == before - model.units()
        ledger.check()
        assert list(ledger) == [keys[-1] for keys, _ in model.entries]
        assert ledger.units == model.units()
        assert ledger.num_bytes == model.num_bytes() <= budget
        assert len(ledger) == len(model.entries)


def test_fits_is_exact() -> None:
    ledger = Ledger(2 * UNIT_BYTES + 5, UNIT_BYTES)
    assert ledger.fits(2, 5)
    assert not ledger.fits(2, 6)
    assert not ledger.fits(3, 0)


def test_a_reservation_is_neither_found_nor_evicted() -> None:
    ledger = Ledger(100, UNIT_BYTES)
    ledger.reserve(chain("a"), 80)
    assert chain("a")[-1] not in ledger
    assert ledger.has_unit(chain("a")[-1])
    with pytest.raises(AssertionError, match="two reservations"):
        ledger.reserve(chain("b"), 80)
    ledger.remove(chain("a")[-1])
    assert not ledger.publish(chain("a")[-1])
    assert ledger.num_bytes == 0


def test_a_negative_budget_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1 bytes"):
        Ledger(-1, UNIT_BYTES)
