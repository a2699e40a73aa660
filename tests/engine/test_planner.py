"""Where chunks end: vectors of hybrid-cache.md section 10 and properties."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonlet.engine.cache.planner import checkpoint_before, plan_end, turn_marks

BIG = (6144, 512)
TOY = (12, 4)


def ends_of(total, budget, geometry, start=0, marks=()):
    ends = []
    while start < total:
        start = plan_end(
            start, budget, total, page_size=geometry[0], unit_size=geometry[1], marks=marks
        )
        ends.append(start)
    return ends


@pytest.mark.parametrize(
    ("total", "budget", "geometry", "start", "marks", "ends"),
    [
        (14000, 8192, BIG, 0, (), [6144, 12288, 13824, 14000]),
        (2800, 8192, BIG, 0, (), [2560, 2800]),
        (2800, 1024, BIG, 0, (), [1024, 2048, 2560, 2800]),
        (9000, 4096, BIG, 0, (), [4096, 6144, 8704, 9000]),
        (6144, 8192, BIG, 0, (), [5632, 6144]),
        (6145, 8192, BIG, 0, (), [6144, 6145]),
        (12288, 8192, BIG, 0, (), [6144, 11776, 12288]),
        (14000, 8192, BIG, 2560, (), [6144, 12288, 13824, 14000]),
        (14000, 8192, BIG, 0, (2560,), [2560, 6144, 12288, 13824, 14000]),
        (50, 16, TOY, 0, (), [12, 24, 36, 48, 50]),
        (23, 16, TOY, 0, (), [12, 20, 23]),
        (24, 16, TOY, 0, (), [12, 20, 24]),
        (25, 16, TOY, 0, (), [12, 24, 25]),
        (50, 8, TOY, 0, (), [8, 12, 20, 24, 32, 36, 44, 48, 50]),
        (50, 10, TOY, 0, (), [8, 12, 20, 24, 32, 36, 44, 48, 50]),
        (50, 16, TOY, 20, (), [24, 36, 48, 50]),
        (50, 50, TOY, 0, (28,), [28, 36, 48, 50]),
    ],
)
def test_vectors(total, budget, geometry, start, marks, ends):
    assert ends_of(total, budget, geometry, start, marks) == ends


def test_a_budget_that_ends_between_endpoints_still_advances():
    # where the peers schedule nothing and starve the request
    assert plan_end(12, 8, 50, page_size=12, unit_size=4) == 20
    assert plan_end(20, 3, 50, page_size=12, unit_size=4) == 23


@settings(max_examples=2000)
@given(
    total=st.integers(1, 400),
    budget=st.integers(1, 60),
    unit=st.integers(1, 6),
    per_page=st.integers(1, 8),
    marks=st.lists(st.integers(0, 60), max_size=4),
    start=st.integers(0, 399),
)
def test_properties(total, budget, unit, per_page, marks, start):
    start %= total
    page, marks = unit * per_page, [mark * unit for mark in marks]
    ends = ends_of(total, budget, (page, unit), start, marks)
    starts = [start, *ends[:-1]]
    assert ends[-1] == total
    for first, end in zip(starts, ends, strict=True):
        assert 1 <= end - first <= budget
        if first % page:
            assert end <= (first // page + 1) * page
    wanted = {*marks, checkpoint_before(total, unit), checkpoint_before(total, page)}
    assert {mark for mark in wanted if start < mark < total} <= set(ends)


@pytest.mark.parametrize(
    ("length", "grid", "place"),
    [(3072, 1536, 1536), (3073, 1536, 3072), (3072, 512, 2560), (2800, 512, 2560),
     (2560, 512, 2048), (2561, 512, 2560), (1, 4, 0), (0, 4, 0)],
)  # fmt: skip
def test_last_endpoint_below(length, grid, place):
    assert checkpoint_before(length, grid) == place


def test_marks_are_endpoints_at_the_last_message_ends():
    tokens = [1, 9, 1, 1, 1, 9, 1, 1, 1, 1, 1, 9, 1]
    assert turn_marks(tokens, {9}, 4, 2) == [12, 4]
    assert turn_marks(tokens, {9}, 4, 1) == [12]
    assert turn_marks(tokens, {9}, 4, 3) == [12, 4]
    assert turn_marks(tokens, {8}, 4, 2) == []
