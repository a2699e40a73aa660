"""The exception tree of moonlet.

    MoonletError
    |-- ConfigError (ValueError)        a configuration field or flag is wrong
    |-- ShapeError (ValueError)         a tensor does not have the shape an operator needs
    |-- CheckpointError                 bytes on disk do not form the model they claim to be
    |   |-- MissingTensor
    |   |-- TensorShapeMismatch
    |   `-- CorruptShard
    |-- RequestError (ValueError)       one request is wrong; carries its HTTP answer
    |   |-- PromptTooLong
    |   |-- BadSchema
    |   `-- UnknownModel
    |-- CapacityError                   a well-formed demand that does not fit
    `-- BackendError                    no operator backend can serve
        `-- BackendUnavailable

Messages follow one pattern: what is wrong, the value seen, what to do.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "BackendError",
    "BackendUnavailable",
    "BadSchema",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "CorruptShard",
    "MissingTensor",
    "MoonletError",
    "PromptTooLong",
    "RequestError",
    "ShapeError",
    "TensorShapeMismatch",
    "UnknownModel",
]


class MoonletError(Exception):
    """Base of every error that moonlet raises on purpose."""


class ConfigError(MoonletError, ValueError):
    """A configuration field, flag or environment variable has an unusable value."""


class ShapeError(MoonletError, ValueError):
    """A tensor's shape, dtype or layout does not fit the operator."""


class CheckpointError(MoonletError):
    """A checkpoint on disk cannot be used as it is."""


class MissingTensor(CheckpointError):
    """A tensor that the architecture needs is absent, or one is present that nobody consumes."""


class TensorShapeMismatch(CheckpointError):
    """A tensor exists with a shape or dtype other than the architecture demands."""


class CorruptShard(CheckpointError):
    """A shard file is truncated, overlapping or otherwise malformed."""


class RequestError(MoonletError, ValueError):
    """A request that cannot be served, with the HTTP answer it deserves.

    Args:
        message: What is wrong, the value seen and what to do.
        status: HTTP status.
        type: Error type of chat-protocol.md section 6.8.
        code: Machine-readable code, or None.
        param: Path of the offending field, e.g. ``messages[2].tool_call_id``, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.type = type
        self.code = code
        self.param = param


class PromptTooLong(RequestError):
    """The prompt (plus the explicit output limit) exceeds the context; names both lengths."""


class BadSchema(RequestError):
    """A JSON schema in the request is malformed or unsupported; names the JSON path."""


class UnknownModel(RequestError):
    """The request names a model that this server does not have (404)."""

    def __init__(self, message: str, *, param: str | None = "model") -> None:
        super().__init__(
            message,
            status=404,
            type="resource_not_found_error",
            code="model_not_found",
            param=param,
        )


class CapacityError(MoonletError):
    """A well-formed demand exceeds what this process was given."""


class BackendError(MoonletError):
    """No backend of an operator can serve the case."""


class BackendUnavailable(BackendError):
    """The wanted backend cannot serve; carries each backend's reason.

    Args:
        message: What was asked for.
        reasons: Backend name to the reason why it cannot serve.
    """

    def __init__(self, message: str, reasons: Mapping[str, str]) -> None:
        listed = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        super().__init__(f"{message} ({listed})" if listed else message)
        self.reasons = dict(reasons)
