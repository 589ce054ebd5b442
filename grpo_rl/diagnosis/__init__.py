"""Explains why sampler and trainer disagree, and where a number became non-finite."""
