"""A model whose next token follows a script: exact expectations without any weights.

It has the interface that the engine uses of `Transformer`. What it remembers of a sequence it
keeps itself, by slot, and it checks on every call that the engine feeds each slot exactly the
tokens that follow: a lost, repeated or foreign token is an error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moonlet.core.config import ModelConfig
from moonlet.core.errors import ShapeError
from moonlet.model.state import BatchMeta, ModelState
from moonlet.testing.tiny import tiny_config

__all__ = ["Script", "ScriptedModel", "count_up", "reply_with"]

Script = Callable[[SequenceOf[int], SequenceOf[int]], int | SequenceOf[float] | Tensor]
"""Maps (prompt ids, generated ids so far) to the next id or to a whole row of logits.

The prompt is what the slot was fed when its logits were wanted for the first time.
"""

PEAK_LOGIT = 30.0


def reply_with(
    reply: SequenceOf[int] | Callable[[SequenceOf[int]], SequenceOf[int]], end_id: int
) -> Script:
    """Return a script that says ``reply`` (or ``reply(prompt)``) and then ``end_id``."""

    def script(prompt: SequenceOf[int], output: SequenceOf[int]) -> int:
        ids = reply(prompt) if callable(reply) else reply
        return ids[len(output)] if len(output) < len(ids) else end_id

    return script


def count_up(modulus: int = 256) -> Script:
    """Return a script whose next id is the newest one plus 1, modulo ``modulus``."""

    def script(prompt: SequenceOf[int], output: SequenceOf[int]) -> int:
        newest = output[-1] if output else prompt[-1]
        return (newest + 1) % modulus

    return script


@dataclass(slots=True)
class _History:
    """What one slot was fed.

    Attributes:
        committed: Rows that can no longer be taken back.
        prompt_length: Length when logits were first wanted, or None before.
    """

    tokens: list[int] = field(default_factory=list)
    committed: int = 0
    prompt_length: int | None = None


class ScriptedModel:
    """Stands in for `Transformer`.

    Args:
        script: Says what comes next. Whatever it raises comes out of `forward`.
        config: Shapes for the engine's state and the vocabulary; `tiny_config` when absent.
        before_forward: Called with the batch before each forward pass, e.g. to wait for a test.

    Attributes:
        num_forward_calls: Forward passes so far, failed ones included.
        batch_sizes: Sequences in each of them.
        num_rows: Packed rows in all of them.
    """

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(
        self,
        script: Script,
        *,
        config: ModelConfig | None = None,
        before_forward: Callable[[BatchMeta], None] | None = None,
    ) -> None:
        self.config = tiny_config() if config is None else config
        self.num_forward_calls = 0
        self.num_rows = 0
        self.batch_sizes: list[int] = []
        self._script = script
        self._before_forward = before_forward
        self._histories: dict[int, _History] = {}

    def forward(self, tokens_T: Tensor, meta: BatchMeta, state: ModelState) -> Tensor:
        """Return the scripted logits as "hidden" ``[T, W]``; zeros where none are wanted.

        Raises:
            ShapeError: A sequence does not continue where its slot stands.
        """
        self.num_forward_calls += 1
        self.num_rows += meta.ragged.num_rows
        self.batch_sizes.append(meta.ragged.num_seqs)
        if self._before_forward is not None:
            self._before_forward(meta)
        hidden_TW = torch.zeros(meta.ragged.num_rows, self.config.vocab_size)
        wanted = set(meta.logits_at_Q.tolist())
        tokens, first = tokens_T.tolist(), 0
        slots, starts = meta.slots_S.tolist(), meta.start_positions_S.tolist()
        for s, length in enumerate(meta.seq_lens):
            history = self._extend(slots[s], starts[s], meta.tentative[s])
            for row in range(first, first + length):
                history.tokens.append(tokens[row])
                if row in wanted:
                    hidden_TW[row] = self._row(history)
            if not meta.tentative[s]:
                history.committed = len(history.tokens)
            first += length
        if any(meta.tentative):
            self._leave_window(meta, state)
        return hidden_TW

    def logits(self, hidden_QD: Tensor) -> Tensor:
        """Return the rows unchanged: they are logits already."""
        return hidden_QD

    def _leave_window(self, meta: BatchMeta, state: ModelState) -> None:
        """Leave zeros in the state, so that there is a window to commit."""
        kda, num_seqs = self.config.kda, meta.ragged.num_seqs
        num_rows = 0 if meta.tentative_rows_E is None else len(meta.tentative_rows_E)
        heads = (kda.num_heads, kda.head_dim, kda.head_dim)
        conv = (3 * kda.projection_size, kda.short_conv_kernel_size - 1)
        for layer in self.config.kda_layers:
            state.kda(layer).store(
                meta,
                torch.zeros(num_seqs, *heads),
                torch.zeros(num_seqs, *conv),
                torch.zeros(num_rows, *heads),
                torch.zeros(num_rows, *conv),
            )

    def _extend(self, slot: int, start: int, is_tentative: bool) -> _History:
        if start == 0:
            self._histories[slot] = _History()
        history = self._histories.get(slot)
        if history is None or not history.committed <= start <= len(history.tokens):
            seen = None if history is None else (history.committed, len(history.tokens))
            raise ShapeError(f"slot {slot} stands at {seen}, but was continued at {start}")
        del history.tokens[start:]
        history.committed = start
        return history

    def _row(self, history: _History) -> Tensor:
        if history.prompt_length is None:
            history.prompt_length = len(history.tokens)
        cut = history.prompt_length
        choice = self._script(history.tokens[:cut], history.tokens[cut:])
        if isinstance(choice, int):
            row_W = torch.zeros(self.config.vocab_size)
            row_W[choice] = PEAK_LOGIT
            return row_W
        return torch.as_tensor(choice, dtype=torch.float32)
