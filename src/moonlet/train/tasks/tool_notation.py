"""The compact notation of an everyday tool.

A request (``asks``): ``{0}`` is the value of parameter 0; ``<1=true>`` sets parameter 1 without
showing it; a leading ``?`` marks a question, anything else is an order.

A result: ``key=kind`` pairs for a JSON object, or a text after ``~`` with ``{kind}`` slots; ``$0``
is the value of parameter 0. Kinds are those of ``values.make_value``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamSpec:
    """A parameter: name options, value kind, description options, enum, optionality."""

    names: tuple[str, ...]
    kind: str
    describes: tuple[str, ...] = ()
    enum: tuple[str, ...] = ()
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """A family of similar tools; see the module docstring."""

    names: tuple[str, ...]
    describes: tuple[str, ...]
    params: tuple[ParamSpec, ...]
    asks: tuple[str, ...]
    results: tuple[str, ...]
    is_calculator: bool = False


def param(
    names: str, kind: str, *describes: str, enum: str = "", optional: bool = False
) -> ParamSpec:
    """Write a parameter in short; ``names`` and ``enum`` are separated by spaces."""
    return ParamSpec(
        names=tuple(names.split()), kind=kind, describes=describes, enum=tuple(enum.split()),
        optional=optional,
    )  # fmt: skip
