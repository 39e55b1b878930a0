"""Runs inside the inference server's processes. Imports nothing of the trainer's side."""
