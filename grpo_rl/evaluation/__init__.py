"""Evaluates a model, or an endpoint that serves one, on held-out rows of several tasks, and compares two models."""
