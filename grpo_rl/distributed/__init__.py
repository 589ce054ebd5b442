"""Several processes, one policy."""
