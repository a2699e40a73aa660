"""Speculation without a draft model: drafting, draft lengths, rounds (speculative.md 4 to 7)."""

from moonlet.engine.speculative.config import SpeculativeConfig
from moonlet.engine.speculative.speculation import Speculation

__all__ = ["Speculation", "SpeculativeConfig"]
