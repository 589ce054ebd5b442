"""Sends the trainer's weights to engines, with versions and proof of delivery."""
