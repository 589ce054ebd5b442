"""A config, checked, and every number that follows from it."""
