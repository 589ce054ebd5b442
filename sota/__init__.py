"""The training scripts: the algorithm from top to bottom."""
