"""What every test of the benchmarks gets: small buffers, and its process as it was before."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_config
from moonlet.train.init import initialize
from moonlet.train.recipe import InitOptions
from moonlet.weights.writer import save_model
from tests.bench.buffers import small_buffers
from tests.bench.load_command import Bench, bench_command


@pytest.fixture(autouse=True)
def _small_and_quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small_buffers(monkeypatch)
    # commands set the number of threads and environment variables of their process
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny model."""
    config = tiny_config()
    model = Transformer(config)
    initialize(model, config, InitOptions(seed=0))
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    save_model(model, folder, config)
    return folder


@pytest.fixture
def bench(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs ``moonlet bench serve`` and reads its files."""
    return bench_command(tmp_path, capsys)
