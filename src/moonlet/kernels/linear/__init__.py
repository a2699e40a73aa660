"""``y = x W^T`` with weights as they are stored."""
