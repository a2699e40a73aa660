"""The mixture as a source of token ids for the trainer.

``TaskSource(tokenizer)(seed, index, progress)`` gives the ids of one conversation and which of them
carry loss. It holds no state, so a run resumes at any index.
"""

from moonlet.chat.tokenizer import Tokenizer
from moonlet.train.tasks.mixture import make_sample
from moonlet.train.tasks.tokenizer_corpus import render_sample


class TaskSource:
    """Training conversations as (ids, loss mask).

    Args:
        tokenizer: Tokenizer of the model to train.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, seed: int, index: int, progress: float) -> tuple[list[int], list[bool]]:
        """Return ids and mask of conversation ``index``; see ``mixture.make_sample``."""
        segments = render_sample(make_sample(seed, index, progress))
        return self._tokenizer.encode_with_mask(segments)
