"""Untrusted programs under limits, without network and with no file but Python's own."""
