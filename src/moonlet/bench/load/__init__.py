"""A load generator for any OpenAI-compatible endpoint; no torch."""
