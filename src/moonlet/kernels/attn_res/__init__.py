"""Attention Residuals: softmax over depth."""
