"""The OpenAI surface: bodies, checks, handlers, frames."""
