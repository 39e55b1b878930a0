"""What a person sees of a run: the progress line, the summary and the reward curve."""
