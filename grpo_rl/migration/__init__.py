"""Converts the configs of other trainers to ours, and names every difference."""
