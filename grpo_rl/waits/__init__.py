"""Waits: each wait of a process has a name and a deadline, and one that passes it is logged."""
