"""Token ids in, token ids out: requests, scheduling, cache, sampling. Knows no text and no HTTP."""

from moonlet.engine.engine import Engine
from moonlet.engine.handle import RequestHandle, merge_outputs
from moonlet.engine.request import (
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenLogprobs,
    TokenOutput,
)
from moonlet.engine.stats import EngineStats

__all__ = [
    "Engine",
    "EngineRequest",
    "EngineStats",
    "FinishReason",
    "RequestHandle",
    "SamplingParams",
    "TokenLogprobs",
    "TokenOutput",
    "merge_outputs",
]
