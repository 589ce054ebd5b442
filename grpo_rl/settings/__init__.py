"""Checks a config, and derives every number that follows from it."""
