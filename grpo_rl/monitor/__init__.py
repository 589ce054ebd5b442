"""Shows what happens in a run: metrics, logs, terminal view and report."""
