"""Deadlines, and processes that can be killed, around code that scores responses."""
