"""Policies: models that score response tokens with gradient, a group's prompt computed once."""
