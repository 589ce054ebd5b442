"""Many engines run on many nodes; this folder alone imports Ray."""
