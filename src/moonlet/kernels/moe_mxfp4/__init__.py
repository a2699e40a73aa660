"""Routed experts from packed MXFP4 weights."""
