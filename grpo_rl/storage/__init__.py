"""Files are written whole or not at all."""
