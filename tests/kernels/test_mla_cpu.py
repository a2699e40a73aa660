"""Native Gated MLA inference against the reference in float64, at every instruction-set level."""

import dataclasses
from collections.abc import Generator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from moonlet.core.errors import BackendError, BackendUnavailable, ShapeError
from moonlet.kernels import _native, _native_ops
from moonlet.kernels.mla import cpu, reference
from moonlet.kernels.mla.pages import LatentPages
from moonlet.kernels.mla.reference import MLAPrefillResult
from moonlet.kernels.ragged import Ragged
from moonlet.kernels.registry import resolve
from moonlet.testing import assert_close

LEVELS = _native.isa_levels()
pytestmark = pytest.mark.skipif(not LEVELS, reason=_native.availability()[1])

CONTEXTS = (1, 3, 17, 63, 64, 65, 100, 257, 1000)
# float32 sums of up to 512 products of size 1, against float64: 2e-6 was seen
TOLERANCE = 6e-6


class Sizes(NamedTuple):
    """Widths of a case."""

    heads: int
    nope: int
    shared: int
    value: int
    latent: int


TINY = Sizes(2, 16, 8, 12, 24)
NANO = Sizes(4, 32, 16, 32, 64)
K3 = Sizes(3, 128, 64, 128, 512)
ODD = Sizes(1, 5, 3, 7, 9)
MANY = Sizes(48, 16, 16, 16, 32)
OVER_A_TILE = Sizes(100, 16, 8, 16, 16)
LAYOUTS = [(16, torch.bfloat16), (64, torch.float32), (64, torch.bfloat16)]
ALL_SIZES = [TINY, NANO, K3, ODD, MANY, OVER_A_TILE]


class Case(NamedTuple):
    """Inputs of an operator; the pages hold NaN wherever no row is."""

    q_THQ: Tensor
    pages: LatentPages
    kv_b_HOR: Tensor
    ragged: Ragged

    def double(self) -> "Case":
        pages = dataclasses.replace(self.pages, rows_GLC=self.pages.rows_GLC.double())
        return Case(self.q_THQ.double(), pages, self.kv_b_HOR.double(), self.ragged)


def scattered(contexts: list[Tensor], page_size: int, latent: int, seed: int = 0) -> LatentPages:
    """Put rows ``[N, C]`` into pages in random order; the rest of every page is NaN."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-len(rows) // page_size) for rows in contexts]
    num_pages = sum(needed) + 2
    order = torch.randperm(num_pages, generator=generator)
    rows_GLC = torch.full((num_pages, page_size, contexts[0].shape[1]), torch.nan)
    # entries beyond a sequence name a page that nobody wrote
    table_SB = order[-1].repeat(len(contexts), max(needed) + 1)
    used = 0
    for s, rows in enumerate(contexts):
        mine = order[used : used + needed[s]]
        used += needed[s]
        table_SB[s, : needed[s]] = mine
        position = torch.arange(len(rows))
        rows_GLC[mine[position // page_size], position % page_size] = rows
    lengths_S = torch.tensor([len(rows) for rows in contexts])
    return LatentPages(
        rows_GLC=rows_GLC, table_SB=table_SB, lengths_S=lengths_S, latent_size=latent
    )


@cache
def make_case(
    sizes: Sizes,
    contexts: tuple[int, ...],
    new: tuple[int, ...],
    page_size: int = 16,
    weights: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random inputs with scores of a few units; the last ``new`` rows of each context are new.

    The same object for the same arguments: nobody writes to it.
    """
    generator = torch.Generator().manual_seed(seed)
    heads, nope, shared, value, latent = sizes
    rows = [torch.randn(n, latent + shared, generator=generator) for n in contexts]
    q_THQ = torch.randn(sum(new), heads, nope + shared, generator=generator)
    kv_b = torch.randn(heads, nope + value, latent, generator=generator) * latent**-0.5
    pages = scattered(rows, page_size, latent, seed)
    return Case(q_THQ, pages, kv_b.to(weights), Ragged.build(new))


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test at one instruction-set level."""
    number = LEVELS.index(request.param)
    monkeypatch.setattr(_native_ops, "level", lambda: number)
    return request.param


@pytest.fixture
def threads() -> Generator[None]:
    """Let the test choose torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run_form(form: str, case: Case, with_max_score: bool = False) -> MLAPrefillResult:
    """Run one form of the native prefill whatever its cost."""
    return cpu._one_form(form == "absorbed", *case, with_max_score)


@cache
def exact(case: Case) -> MLAPrefillResult:
    """The reference in float64, computed once for all levels."""
    return reference.mla_prefill(*case.double(), True)


@cache
def exact_step(case: Case) -> Tensor:
    q, pages, kv_b, _ = case.double()
    return reference.mla_decode(q, pages, kv_b)


@pytest.mark.parametrize(("page_size", "weights"), LAYOUTS, ids=str)
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=str)
@pytest.mark.usefixtures("level")
def test_decode_equals_the_reference(sizes: Sizes, page_size: int, weights: torch.dtype) -> None:
    case = make_case(sizes, CONTEXTS, (1,) * len(CONTEXTS), page_size, weights)
    actual = cpu.mla_decode(*case[:3])
    assert actual.dtype == torch.float32
    assert_close(actual, exact_step(case), atol=TOLERANCE)


@pytest.mark.parametrize(("page_size", "weights"), LAYOUTS, ids=str)
@pytest.mark.parametrize("sizes", ALL_SIZES, ids=str)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.usefixtures("level")
def test_prefill_equals_the_reference(
    form: str, sizes: Sizes, page_size: int, weights: torch.dtype
) -> None:
    contexts, new = (1, 17, 64, 100, 130, 150), (1, 3, 64, 65, 130, 7)
    case = make_case(sizes, contexts, new, page_size, weights)
    expected, actual = exact(case), run_form(form, case, True)
    assert_close(actual.o_THV, expected.o_THV, atol=TOLERANCE)
    assert actual.max_score_H is not None
    assert expected.max_score_H is not None
    assert_close(actual.max_score_H, expected.max_score_H, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("length", CONTEXTS)
@pytest.mark.usefixtures("level")
def test_whole_prompts_equal_the_reference(form: str, length: int) -> None:
    case = make_case(NANO, (length,), (length,), 64)
    result = run_form(form, case)
    assert result.max_score_H is None
    assert_close(result.o_THV, exact(case).o_THV, atol=TOLERANCE)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.usefixtures("level")
def test_huge_scores_neither_overflow_nor_lose_the_winner(form: str) -> None:
    # small integers and a scale of 1/4: scores of up to 1e7 are exact in float32 in both forms
    generator = torch.Generator().manual_seed(3)
    sizes, length = Sizes(3, 12, 4, 16, 16), 600

    def integers(*shape: int, top: int) -> Tensor:
        return torch.randint(-top, top + 1, shape, generator=generator).float()

    rows = integers(length, 20, top=4)
    q = integers(40, 3, 16, top=4) * 2048
    kv_b = integers(3, 28, 16, top=2)
    case = Case(q, scattered([rows], 16, sizes.latent), kv_b, Ragged.build([40]))
    expected, actual = exact(case), run_form(form, case, True)
    assert expected.max_score_H is not None
    assert expected.max_score_H.min() > 1e5
    assert actual.max_score_H is not None
    assert torch.equal(actual.max_score_H.double(), expected.max_score_H.double())
    assert_close(actual.o_THV, expected.o_THV, atol=1e-4)  # values of up to 1e2


# enough work that more threads get it; four heads of one prompt are cut into more tasks for them
@pytest.mark.parametrize(
    ("contexts", "new"), [((700, 1500, 40), (600, 5, 40)), ((700,), (600,))], ids=["batch", "one"]
)
@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.usefixtures("level", "threads")
def test_results_do_not_depend_on_threads(
    form: str, contexts: tuple[int, ...], new: tuple[int, ...]
) -> None:
    case = make_case(NANO, contexts, new)
    results = []
    for count in (1, 2, 3, 4):
        torch.set_num_threads(count)
        results.append(run_form(form, case, True))
    for other in results[1:]:
        assert torch.equal(other.o_THV, results[0].o_THV)
        assert torch.equal(other.max_score_H, results[0].max_score_H)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.usefixtures("level")
def test_neighbours_do_not_change_a_row(form: str) -> None:
    case = make_case(NANO, (300, 700, 40), (10, 4, 40))
    together = run_form(form, case).o_THV.split(list(case.ragged.seq_lens))
    for s, q in enumerate(case.q_THQ.split(list(case.ragged.seq_lens))):
        alone = Case(q, case.pages.select(torch.tensor([s])), case.kv_b_HOR, Ragged.build([len(q)]))
        assert torch.equal(run_form(form, alone).o_THV, together[s])


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65, 200, 299])
@pytest.mark.usefixtures("level")
def test_a_cut_anywhere_equals_one_piece(cut: int) -> None:
    case = make_case(NANO, (300,), (300,))
    whole = cpu.mla_prefill(*case).o_THV
    pages = dataclasses.replace(case.pages, lengths_S=torch.tensor([cut]))
    first = cpu.mla_prefill(case.q_THQ[:cut], pages, case.kv_b_HOR, Ragged.build([cut]))
    rest = cpu.mla_prefill(case.q_THQ[cut:], case.pages, case.kv_b_HOR, Ragged.build([300 - cut]))
    assert_close(torch.cat([first.o_THV, rest.o_THV]), whole, atol=TOLERANCE)


@pytest.mark.usefixtures("level")
def test_a_window_equals_its_tokens_decoded_one_by_one_bit_for_bit() -> None:
    case = make_case(NANO, (900,), (6,))
    window = run_form("absorbed", case).o_THV
    for i in range(6):
        pages = dataclasses.replace(case.pages, lengths_S=torch.tensor([895 + i]))
        step = cpu.mla_decode(case.q_THQ[i : i + 1], pages, case.kv_b_HOR)
        assert torch.equal(step, window[i : i + 1])


def test_more_partial_results_than_are_kept_at_a_time() -> None:
    # rows of 300 take two partial results each, of which the library keeps 128
    case = make_case(TINY, (430, 300), (130, 3))
    assert_close(run_form("absorbed", case).o_THV, exact(case).o_THV, atol=TOLERANCE)


def test_each_sequence_takes_the_cheaper_form(monkeypatch: pytest.MonkeyPatch) -> None:
    forms = []
    one_form = cpu._one_form

    def seen(is_absorbed: bool, *rest: object) -> MLAPrefillResult:
        forms.append(is_absorbed)
        return one_form(is_absorbed, *rest)

    monkeypatch.setattr(cpu, "_one_form", seen)
    sizes = Sizes(16, 32, 16, 32, 64)
    case = make_case(sizes, (30, 800, 1, 50), (30, 2, 1, 40))
    expected, actual = exact(case), cpu.mla_prefill(*case, True)
    assert forms == [True, False]
    assert_close(actual.o_THV, expected.o_THV, atol=TOLERANCE)
    assert actual.max_score_H is not None
    assert_close(actual.max_score_H, expected.max_score_H, atol=TOLERANCE)
    cpu.mla_prefill(*make_case(sizes, (30, 20), (30, 20)))
    assert forms[2:] == [False]
    cpu.mla_prefill(*make_case(sizes, (900, 800), (1, 2)))
    assert forms[3:] == [True]


def test_pages_in_order_are_read_in_place_with_the_same_result() -> None:
    case = make_case(NANO, (500,), (40,))
    rows = case.pages.packed()
    padding = torch.full((12, NANO.latent + NANO.shared), torch.nan)
    in_order = torch.cat([torch.cat(rows, dim=1), padding]).view(32, 16, -1)
    pages = dataclasses.replace(
        case.pages, rows_GLC=in_order, table_SB=torch.arange(32).unsqueeze(0)
    )
    for form in ("absorbed", "expanded"):
        moved = run_form(form, case._replace(pages=pages))
        assert torch.equal(moved.o_THV, run_form(form, case).o_THV)


def test_one_row_per_page() -> None:
    case = make_case(TINY, (70, 5), (9, 5), page_size=1)
    for form in ("absorbed", "expanded"):
        assert_close(run_form(form, case).o_THV, exact(case).o_THV, atol=TOLERANCE)


def test_what_the_library_would_misread_is_refused() -> None:
    q, pages, kv_b, ragged = make_case(TINY, (20, 5), (2, 1))

    def changed(**fields: object) -> LatentPages:
        return dataclasses.replace(pages, **fields)

    refused = [
        ("rows has dtype", (q, changed(rows_GLC=pages.rows_GLC.double()), kv_b, ragged)),
        ("table has dtype", (q, changed(table_SB=pages.table_SB.int()), kv_b, ragged)),
        ("lengths has dtype", (q, changed(lengths_S=pages.lengths_S.int()), kv_b, ragged)),
        ("q has dtype", (q.double(), pages, kv_b, ragged)),
        ("q has shape", (q[:2], pages, kv_b, ragged)),
        ("kv_b has dtype", (q, pages, kv_b.double(), ragged)),
        ("kv_b has shape", (q, pages, kv_b[..., :20], ragged)),
        ("do not fit kv_b", (q, pages, kv_b[:, :16], ragged)),
        ("pages of 2 sequences for 1", (q, pages, kv_b, Ragged.build([3]))),
    ]
    for message, arguments in refused:
        with pytest.raises(ShapeError, match=message):
            cpu.mla_prefill(*arguments)
    with pytest.raises(ShapeError, match="q has shape"):
        cpu.mla_decode(q, pages, kv_b)


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
def test_rows_outside_the_pages_are_refused(form: str) -> None:
    case = make_case(TINY, (20, 5), (2, 1))
    capacity = case.pages.table_SB.shape[1] * 16
    num_pages = case.pages.rows_GLC.shape[0]
    for page in (-1, num_pages):
        table = case.pages.table_SB.clone()
        table[0, 1] = page
        pages = dataclasses.replace(case.pages, table_SB=table)
        with pytest.raises(BackendError, match="status 1"):
            run_form(form, case._replace(pages=pages))
    for lengths in ([capacity + 1, 5], [1, 5], [20, 0]):
        pages = dataclasses.replace(case.pages, lengths_S=torch.tensor(lengths))
        with pytest.raises(BackendError, match="status 1"):
            run_form(form, case._replace(pages=pages))


def test_scratch_that_is_too_small_is_refused() -> None:
    q, pages, kv_b, _ = make_case(TINY, (20, 5), (1, 1))
    seqs, out, scratch = torch.arange(2), torch.zeros(2, 2, 12), torch.zeros(8)
    num_pages, page_size, _ = pages.rows_GLC.shape
    counts = (2, 2, num_pages, page_size, pages.table_SB.shape[1], *TINY)
    tables = (pages.rows_GLC, pages.table_SB, seqs, pages.lengths_S)
    with pytest.raises(BackendError, match="status 1"):
        _native_ops.call("mla_absorbed", q, *tables, kv_b, 0, out, None, scratch, 8, *counts)


def test_inference_takes_the_native_operators_and_training_does_not() -> None:
    serving, training = resolve(is_inference=True), resolve()
    for op in ("mla_prefill", "mla_decode"):
        assert serving.backend(op) == "cpu"
        assert training.backend(op) == "reference"
    with pytest.raises(BackendUnavailable, match="no gradient"):
        resolve(wanted={"mla_decode": "cpu"})
