"""Prompts in, samples out."""
