"""Builds parts from settings, and a run from parts."""
