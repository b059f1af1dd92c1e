"""Doors into Weighlock for programs that already speak to PyTorch's own machinery."""
