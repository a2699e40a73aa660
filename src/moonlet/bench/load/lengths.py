"""Distributions of prompt and output lengths, written as one flag."""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import inf, isfinite, log

from moonlet.core.errors import ConfigError

__all__ = ["Lengths"]

_FORMS = "give N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA[,MAX]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers, at least 1.

    Attributes:
        kind: ``fixed``, ``uniform`` or ``lognormal``.
        values: The length; least and most, both included; or median, sigma and most.
    """

    kind: str
    values: tuple[float, ...]

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """Read ``N``, ``uniform:LOW,HIGH`` or ``lognormal:MEDIAN,SIGMA[,MAX]``.

        Args:
            text: The flag's value.
            flag: Its name, for the message.

        Raises:
            ConfigError: Another form, or values that allow no length.
        """
        kind, colon, rest = text.partition(":")
        kind, rest = (kind, rest) if colon else ("fixed", text)
        try:
            if kind == "lognormal":
                median, sigma, *most = (float(value) for value in rest.split(","))
                values: tuple[float, ...] = (median, sigma, *(most or (inf,)))
                is_right = median >= 1 and 0 <= sigma < inf and len(values) == 3
                is_right = is_right and isfinite(median) and values[2] >= 1
            else:
                values = tuple(int(value) for value in rest.split(","))
                is_right = len(values) == {"fixed": 1, "uniform": 2}.get(kind)
                is_right = is_right and values[0] >= 1 and values == tuple(sorted(values))
        except ValueError:
            is_right, values = False, ()
        if not is_right:
            raise ConfigError(f"{flag} is {text}; {_FORMS}, with lengths of at least 1")
        return cls(kind, values)

    def draw(self, rng: random.Random) -> int:
        """Return the next length."""
        if self.kind == "fixed":
            return int(self.values[0])
        if self.kind == "uniform":
            low, high = self.values
            return rng.randint(int(low), int(high))
        median, sigma, most = self.values
        return max(1, round(min(rng.lognormvariate(log(median), sigma), most)))
