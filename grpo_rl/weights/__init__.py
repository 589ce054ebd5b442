"""Trainer weights to engines, with versions and proof of delivery."""
