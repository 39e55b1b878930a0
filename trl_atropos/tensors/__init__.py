"""Moves tensors between processes. The trainer and the server both import this room, which needs
torch alone."""
