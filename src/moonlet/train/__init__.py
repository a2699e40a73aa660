"""Training: data, losses, Per-Head Muon, Quantile Balancing, quantisation-aware training, runs."""
