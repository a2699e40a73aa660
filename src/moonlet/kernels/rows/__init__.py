"""Operators on whole rows that lie between the mechanisms: embedding, sum, sigmoid gate."""
