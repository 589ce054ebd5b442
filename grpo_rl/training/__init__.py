"""One optimizer step and its state."""
