"""Why numbers disagree."""
