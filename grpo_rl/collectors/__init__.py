"""Collectors sample and score groups."""
