"""Serves a model to agents by OpenAI's API, without training it."""
