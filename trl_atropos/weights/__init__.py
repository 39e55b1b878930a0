"""Brings new weights to the servers that sample from them, and saves and loads checkpoints."""
