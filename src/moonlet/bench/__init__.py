"""Measurements: every figure comes with the hardware bound of the same run and their ratio."""
