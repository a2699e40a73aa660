"""Procedural tasks of the small model: training conversations and held-out evaluation."""
