"""Takes an optimizer step, and keeps its state."""
