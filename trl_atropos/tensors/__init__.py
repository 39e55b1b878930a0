"""How tensors travel between processes. Trainer and server both import this, so it stays light: torch alone."""
