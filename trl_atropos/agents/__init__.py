"""Environments for programs that know a URL and nothing of training: they run in their sessions."""
