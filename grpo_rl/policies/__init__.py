"""Models that score tokens with gradient."""
