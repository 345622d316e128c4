"""Proves, bit for bit, which PyTorch model families may be replayed from CUDA graphs."""

__version__ = "0.1.0"
