"""Native sampling draws the reference's ids: filters, ties, shapes of distributions, threads."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonlet.core.errors import ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.registry import resolve_operator
from moonlet.kernels.sample import cpu, reference
from moonlet.kernels.sample.reference import Filters
from moonlet.kernels.spec import Spec

pytestmark = pytest.mark.skipif(not _native.availability()[0], reason=_native.availability()[1])

LAST = 1 - 2.0**-53


@pytest.fixture(params=range(len(_native.isa_levels())), ids=_native.isa_levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(_native_ops, "level", lambda: request.param)
    return request.param


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def filters(
    rows: int,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Filters:
    def column(value: float) -> Tensor:
        return torch.full((rows, 1), value, dtype=torch.float64)

    return Filters(
        temperature_M1=column(temperature),
        min_p_M1=column(min_p) if min_p else None,
        top_k_M1=column(top_k) if top_k else None,
        top_p_M1=column(top_p) if top_p < 1 else None,
    )


def draws(logits_W: Tensor, uniforms: list[float], **options: float) -> list[list[int]]:
    """Ids by the native operator and by the reference for many uniforms on one row."""
    settings_ = filters(1, **options)
    row = logits_W[None]
    probabilities = reference.distribution(row, settings_)
    return [
        [int(cpu.sample(row, settings_, [u])) for u in uniforms],
        reference.draw(probabilities.expand(len(uniforms), -1), uniforms).tolist(),
    ]


def normal(size: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale


def peaked(size: int) -> Tensor:
    logits = normal(size, 1, 1.0)
    logits[size // 3] = 30.0
    return logits


def tied(size: int) -> Tensor:
    return (normal(size, 2, 2.0) * 2).round() / 2


def masked(size: int) -> Tensor:
    logits = normal(size, 3)
    logits[torch.arange(size) % 5 != size % 5] = -math.inf
    logits[size // 2] = 1.0
    return logits


SHAPES: dict[str, Callable[[int], Tensor]] = {
    "normal": normal,
    "flat": torch.zeros,
    "peaked": peaked,
    "tied": tied,
    "masked": masked,
    "rising": lambda size: torch.arange(size) * (20.0 / size),
}
# neither shares nor draws are multiples of 1 / W: there rounding would decide
OPTIONS = [
    {},
    {"temperature": 0.6},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50, "top_p": 0.87654},
    {"top_p": 0.54321},
    {"top_p": 0.98765, "temperature": 1.7},
    {"top_p": 1e-6},
    {"min_p": 0.0314},
    {"min_p": 1.0},
    {"min_p": 0.01234, "top_k": 40, "top_p": 0.91234, "temperature": 0.8},
    {"min_p": 1e-4, "top_p": 0.77777},
    {"top_k": 5000},
    {"top_k": 99_991, "top_p": 0.95432},
]
UNIFORMS = [0.0, 1e-9, 0.0512347, 0.271828, 0.5123461, 0.7771239, 0.9312347, 0.9999917, LAST]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1, 3, 257, 163_840])
def test_ids_equal_the_reference(level: int, shape: str, size: int) -> None:
    logits = SHAPES[shape](size)
    every = OPTIONS if size < 1000 else OPTIONS[level :: len(_native.isa_levels())]
    for options in every:
        seen, wanted = draws(logits, UNIFORMS, **options)
        assert seen == wanted, f"{options}"


@settings(max_examples=150)
@given(
    st.lists(
        st.sampled_from([-math.inf, -4.0, -1.5, 0.0, 0.25, 0.25, 3.0, 3.0]), min_size=1, max_size=40
    ),
    st.floats(0.05, 5.0),
    st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    st.integers(1, 45),
    st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    st.floats(0, LAST),
)
def test_few_tied_logits(
    values: list[float], temperature: float, min_p: float, top_k: int, top_p: float, number: float
) -> None:
    logits = torch.tensor([*values, 3.0])
    options = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    probabilities = reference.distribution(logits[None], filters(1, **options))
    sums = probabilities.cumsum(1)[0]
    seen, wanted = draws(logits, [number], **options)
    if seen != wanted:
        assert is_at_a_border(logits, options, sums, number)


def is_at_a_border(logits: Tensor, options: dict[str, float], sums: Tensor, number: float) -> bool:
    """Whether the draw or the top-p cut is closer to a border than the documented rounding."""
    if (sums - number).abs().min() < 1e-11:
        return True
    uncut = reference.distribution(logits[None], filters(1, **{**options, "top_p": 1.0}))[0]
    before = uncut.sort(descending=True).values.cumsum(0)
    return bool((before - options["top_p"]).abs().min() < 1e-11)


def kept_range(logits_W: Tensor, **options: float) -> tuple[int, int]:
    """Lowest and highest id that can be drawn."""
    row, chosen = logits_W[None], filters(1, **options)
    return int(cpu.sample(row, chosen, [0.0])), int(cpu.sample(row, chosen, [LAST]))


def test_ties_at_a_cut_keep_the_lower_id(level: int) -> None:
    for size in (8, 257, 5000, 163_840):
        flat = torch.zeros(size)
        assert kept_range(flat, top_k=3) == (0, 2)
        assert kept_range(flat, top_p=0.5) == (0, (size + 1) // 2 - 1)
        assert kept_range(flat, min_p=1.0) == (0, size - 1)
        assert kept_range(flat, top_k=6, top_p=0.5) == (0, 2)
        two = flat.clone()
        two[[2, size - 1]] = 1.0
        assert kept_range(two, top_k=1) == (2, 2)
        assert kept_range(two, top_k=3) == (0, size - 1)
        assert kept_range(two, min_p=0.99) == (2, size - 1)


def test_a_tie_of_weights_is_a_tie_whatever_the_logits(level: int) -> None:
    # at this temperature all probabilities are equal, so top-k keeps the lowest ids
    logits = normal(3000)
    seen, wanted = draws(logits, UNIFORMS, temperature=1e30, top_k=5)
    assert seen == wanted
    assert set(seen) <= set(range(5))


def test_extreme_temperatures(level: int) -> None:
    logits = normal(500, scale=1e4)
    best = int(logits.argmax())
    for temperature in (1e-30, 5e-324, 1e-3):
        for options in ({}, {"top_k": 9}, {"top_p": 0.9}, {"min_p": 0.1}):
            seen, wanted = draws(logits, UNIFORMS, temperature=temperature, **options)
            assert seen == wanted == [best] * len(UNIFORMS)
    for options in ({}, {"top_p": 0.87654}, {"top_k": 17}):
        seen, wanted = draws(logits, UNIFORMS, temperature=1e300, **options)
        assert seen == wanted


def test_an_impossible_id_is_never_drawn(level: int) -> None:
    for size in (5, 2048, 5000):
        logits = torch.full((size,), -math.inf)
        logits[[1, size - 2]] = torch.tensor([0.0, 1.0])
        for options in ({}, {"top_k": 4}, {"top_p": 0.9999}, {"min_p": 1e-3}):
            assert kept_range(logits, **options) == (1, size - 2)


def test_draws_follow_the_law(level: int) -> None:
    # an even grid of uniforms hits every id in proportion, up to one cell
    cells, size = 2000, 3000
    logits = normal(size, 5)
    chosen = filters(cells, top_k=9)
    grid = [(cell + 0.5) / cells for cell in range(cells)]
    ids = cpu.sample(logits.expand(cells, size), chosen, grid)
    exact = reference.distribution(logits[None], filters(1, top_k=9))[0]
    counts = torch.bincount(ids, minlength=size)
    assert ((counts - exact * cells).abs() <= 1).all()
    assert (counts[exact == 0] == 0).all()


def test_rows_have_their_own_parameters(level: int) -> None:
    rows, size = 7, 3000
    logits = torch.stack([normal(size, seed) for seed in range(rows)])
    column = torch.tensor
    chosen = Filters(
        temperature_M1=column([0.5, 1, 2, 1, 1, 3, 1], dtype=torch.float64)[:, None],
        min_p_M1=column([0, 0.1, 0, 0, 0.02, 0, 0], dtype=torch.float64)[:, None],
        top_k_M1=column([size, 5, 3, size, 9, 1, size], dtype=torch.float64)[:, None],
        top_p_M1=column([1, 1, 0.6, 0.8, 0.9, 1, 1], dtype=torch.float64)[:, None],
    )
    uniforms = [0.1, 0.9, 0.3, 0.7, 0.2, 0.6, LAST]
    seen = cpu.sample(logits, chosen, uniforms)
    assert seen.dtype == torch.int64
    assert torch.equal(seen, reference.sample(logits, chosen, uniforms))


@pytest.mark.usefixtures("restored_threads")
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_threads_and_company_do_not_change_an_id(rows: int) -> None:
    size = 40_000
    logits = torch.stack([normal(size, seed) for seed in range(rows)])
    for options in ({}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.01, "top_p": 0.8}):
        for uniform in (0.137, 0.842, LAST):
            torch.set_num_threads(1)
            alone = [int(cpu.sample(row[None], filters(1, **options), [uniform])) for row in logits]
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                seen = cpu.sample(logits, filters(rows, **options), [uniform] * rows)
                assert seen.tolist() == alone


def test_bad_rows_end_with_some_id_of_the_vocabulary(level: int) -> None:
    # the engine fails such requests before; the kernel must only stay within its memory
    for value in (math.nan, -math.inf, math.inf):
        for fill in (torch.full((3000,), value), torch.where(torch.arange(3000) == 7, value, 0.0)):
            for options in ({}, {"top_k": 4}, {"top_p": 0.5}, {"min_p": 0.1}):
                ids = kept_range(fill, **options)
                assert all(0 <= id < 3000 for id in ids)


def test_strided_logits_and_no_rows() -> None:
    logits = torch.stack([normal(300), normal(300, 1)], dim=1)
    assert not logits.T.is_contiguous()
    chosen = filters(2, top_k=5)
    seen = cpu.sample(logits.T, chosen, [0.4, 0.6])
    assert torch.equal(seen, cpu.sample(logits.T.contiguous(), chosen, [0.4, 0.6]))
    assert cpu.sample(logits[:0], filters(0), []).shape == (0,)


def test_refuses_what_the_library_would_misread() -> None:
    logits = torch.zeros(2, 9)
    with pytest.raises(ShapeError, match="logits has dtype"):
        cpu.sample(logits.double(), filters(2), [0.5, 0.5])
    with pytest.raises(ShapeError, match="filter has shape"):
        cpu.sample(logits, filters(3), [0.5, 0.5])
    with pytest.raises(ShapeError, match="1 uniform"):
        cpu.sample(logits, filters(2), [0.5])


def test_the_registry_gives_the_native_one_whatever_the_model_dtype() -> None:
    assert resolve_operator("sample") is cpu.sample
    device = torch.device("cpu")
    assert cpu.refusal(Spec(device=device, dtype=torch.bfloat16)) is None
    assert "meta" in str(cpu.refusal(Spec(device=torch.device("meta"))))
    assert resolve_operator("sample", "meta") is reference.sample
