"""What is measured of batches and steps, and what it means."""
