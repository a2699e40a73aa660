"""Requests for engine tests, and a gate that stops the model between two steps."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

from moonlet.engine import Engine, EngineRequest, SamplingParams
from moonlet.model.state import BatchMeta
from tests.patience import PATIENCE_S

END = 258
MakeEngine = Callable[..., Engine]


def request(
    name: str, prompt: SequenceOf[int] = (1, 2, 3), constraint: object = None, **params: object
) -> EngineRequest:
    params.setdefault("temperature", 0.0)
    sampling = SamplingParams(**params)
    return EngineRequest(
        request_id=name, prompt_ids=prompt, sampling=sampling, constraint=constraint
    )


class Gate:
    """Lets a forward pass begin only when the test says so; `open` lets all of them."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)
        self._is_open = False

    def __call__(self, meta: BatchMeta) -> None:
        self.entered.release()
        if not self._is_open:
            assert self._permits.acquire(timeout=PATIENCE_S)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self._permits.release()

    def open(self) -> None:
        self._is_open = True
        self._permits.release(1000)

    def wait_until_inside(self) -> None:
        assert self.entered.acquire(timeout=PATIENCE_S)
