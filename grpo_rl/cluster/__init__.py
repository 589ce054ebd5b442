"""A cluster runs many engines on many nodes; only this folder imports Ray."""
