"""How much memory a run will take, from its recipe and its model's config alone."""
