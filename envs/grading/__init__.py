"""Grading: extracts the answer that a response states from its text, and judges it; without torch."""
