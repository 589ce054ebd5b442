"""Measures this machine's best rates, and how near a step comes to them."""
