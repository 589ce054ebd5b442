"""Policies: models that score response tokens with gradient, common beginnings computed once."""
