"""Measures batches and steps, and says what the measures mean."""
