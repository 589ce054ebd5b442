"""Settings to parts."""
