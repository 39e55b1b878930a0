"""Runs before the server in `vllm_mode: restart`."""
