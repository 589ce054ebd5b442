"""Predicts what a config needs before it runs; never imported by training."""
