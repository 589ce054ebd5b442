"""Settings to parts, and parts to a run."""
