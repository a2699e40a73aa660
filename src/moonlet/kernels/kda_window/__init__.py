"""Verification windows of Kimi Delta Attention: outputs without a trace, then replay."""
