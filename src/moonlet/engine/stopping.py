"""When a sequence ends: stop ids, the output limit, the context.

Stop strings are text and therefore matched above the engine, which is then told to abort.
"""

from __future__ import annotations

from collections.abc import Set

from moonlet.engine.request import FinishReason, Sequence

__all__ = ["finish_after"]


def finish_after(sequence: Sequence, id: int, stop_ids: Set[int]) -> FinishReason | None:
    """Say whether the sequence ends with the token just appended.

    A stop id wins over the limit when both apply: the model did end its message.

    Args:
        sequence: Its ``output_ids`` end with ``id``.
        id: The token just appended.
        stop_ids: Ids at which the model ends a message (chat-protocol.md section 2.2, note c);
            ignored where the request says so.

    Returns:
        ``"stop"``, ``"length"``, or None to go on.
    """
    sampling = sequence.request.sampling
    if id in sampling.stop_token_ids or (id in stop_ids and not sampling.ignore_eos):
        return "stop"
    if sequence.num_tokens >= sequence.max_total_tokens:
        return "length"
    constraint = sequence.request.constraint
    if constraint is not None and constraint.is_done():
        return "stop"
    return None
