"""Shows a run: progress line, summary, model card, and the page of `trl-atropos report`."""
