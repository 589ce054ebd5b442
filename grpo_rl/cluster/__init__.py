"""Many engines on many nodes; the only importer of Ray."""
