"""Every operation in plain PyTorch, on any device: the specification of all backends."""
