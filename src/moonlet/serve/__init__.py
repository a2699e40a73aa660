"""The HTTP server: an OpenAI-compatible surface over the engine."""

from moonlet.serve.app import create_app
from moonlet.serve.settings import GenerationDefaults, ServeConfig

__all__ = ["GenerationDefaults", "ServeConfig", "create_app"]
