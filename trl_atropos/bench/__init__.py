"""Benchmarks of the package's own parts, run by `trl-atropos bench`."""
