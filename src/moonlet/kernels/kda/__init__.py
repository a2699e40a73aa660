"""Kimi Delta Attention: recurrence and chunkwise form."""
