"""A run and its folder: what is logged, saved, resumed and told."""
