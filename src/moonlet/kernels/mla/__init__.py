"""Gated multi-head latent attention without positions."""
