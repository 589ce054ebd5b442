"""Checks a model before it is trained, line by line: what is in order, and what to do."""
