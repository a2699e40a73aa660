"""The sender of a hand-over: run by `test_session.py` as a process of its own.

Computes a prompt but its last token, writes the session to standard output, and leaves in a file
the logits that it gets itself when it goes on.
"""

import random
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from moonlet.core.config import ModelConfig
from moonlet.engine.cache.external import SessionHeader, StateGeometry, export_session
from moonlet.engine.cache.state import PagedState
from moonlet.engine.cache.transfer import SequenceMemory
from moonlet.model.state import BatchMeta
from moonlet.model.transformer import Transformer
from moonlet.testing import tiny_model


def session_tokens(position: int) -> list[int]:
    generator = random.Random(position)
    return [generator.randrange(256) for _ in range(position + 1)]


def memory(
    config: ModelConfig, *, page_size: int, slot: int, pages: Sequence[int]
) -> SequenceMemory:
    state = PagedState(config, num_slots=2, num_pages=9, page_size=page_size, max_model_len=24)
    state.bind(slot, pages)
    return SequenceMemory(state=state, slot=slot, pages=pages)


@torch.inference_mode()
def continued(
    model: Transformer, memory: SequenceMemory, tokens: list[int], start: int, num_greedy: int
) -> list[npt.NDArray[np.float32]]:
    """Run ``tokens`` at ``start``, then greedily chosen ones; return all last rows' logits."""
    found = []
    for _ in range(num_greedy + 1):
        meta = BatchMeta.build(
            [len(tokens)], slots=[memory.slot], start_positions=[start], logits="last"
        )
        hidden_TD = model.forward(torch.tensor(tokens), meta, memory.state)
        logits_QW = model.logits(hidden_TD.index_select(0, meta.logits_at_Q))
        found.append(logits_QW.numpy())
        start += len(tokens)
        tokens = [int(logits_QW.argmax())]
    return found


def main(path: Path) -> None:
    model, position = tiny_model(), 13
    tokens = session_tokens(position)
    source = memory(model.config, page_size=4, slot=2, pages=[9, 3, 7, 1, 4, 8])
    continued(model, source, tokens[:position], 0, 0)
    header = SessionHeader(
        fingerprint="tiny",
        geometry=StateGeometry.of(model.config, "float32"),
        token_ids=tuple(tokens),
        position=position,
    )
    export_session(sys.stdout.buffer, header, source.read_rows, source.read_state)
    sys.stdout.close()
    logits = continued(model, source, [tokens[position]], position, 3)
    path.write_bytes(b"".join(x.tobytes() for x in logits))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
