"""Micro-batches: their order, their padding, and what is added to their loss."""
