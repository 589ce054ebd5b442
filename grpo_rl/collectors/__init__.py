"""Groups, sampled and scored."""
