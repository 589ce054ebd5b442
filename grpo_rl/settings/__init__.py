"""Settings are declared and checked, and every number that follows from them is computed."""
