"""Weights out: how a new policy reaches the server that samples from it."""
