"""Root mean square norm, plain and gated."""
