"""Sampling: from logits to a drawn id."""
