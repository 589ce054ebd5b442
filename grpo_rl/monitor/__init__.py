"""Shows what happens in a run: metrics, logs and terminal view."""
