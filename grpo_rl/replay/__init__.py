"""Recomputes a stored step under another loss."""
