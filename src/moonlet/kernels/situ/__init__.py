"""Gated activations: SiTU-GLU and SwiGLU."""
