"""Several processes train one policy."""
