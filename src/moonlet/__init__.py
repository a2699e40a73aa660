"""The Kimi K3 system as one package: model, checkpoints, chat protocol, serving, training.

Importing this package loads neither torch nor a web framework: the names below are imported when
they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moonlet.chat.parser import Parser as Parser
    from moonlet.chat.render import render as render
    from moonlet.chat.tokenizer import Tokenizer as Tokenizer
    from moonlet.core.config import ModelConfig as ModelConfig
    from moonlet.core.errors import MoonletError as MoonletError
    from moonlet.core.hf_config import read_config as read_config
    from moonlet.engine.engine import Engine as Engine
    from moonlet.engine.request import EngineRequest as EngineRequest
    from moonlet.engine.request import SamplingParams as SamplingParams
    from moonlet.model.transformer import Transformer as Transformer
    from moonlet.weights.checkpoint import Checkpoint as Checkpoint
    from moonlet.weights.checkpoint import load_model as load_model
    from moonlet.weights.writer import save_model as save_model

__version__ = "0.1.0"

_HOMES = {
    "Checkpoint": "weights.checkpoint",
    "Engine": "engine.engine",
    "EngineRequest": "engine.request",
    "ModelConfig": "core.config",
    "MoonletError": "core.errors",
    "Parser": "chat.parser",
    "SamplingParams": "engine.request",
    "Tokenizer": "chat.tokenizer",
    "Transformer": "model.transformer",
    "load_model": "weights.checkpoint",
    "read_config": "core.hf_config",
    "render": "chat.render",
    "save_model": "weights.writer",
}

__all__ = [
    "Checkpoint",
    "Engine",
    "EngineRequest",
    "ModelConfig",
    "MoonletError",
    "Parser",
    "SamplingParams",
    "Tokenizer",
    "Transformer",
    "__version__",
    "load_model",
    "read_config",
    "render",
    "save_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'moonlet' has no attribute {name!r}")
    return getattr(import_module(f"moonlet.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
