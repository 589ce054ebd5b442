"""A stored step under another loss."""
