"""Losses: pure functions of tokens, and the loss module that sums them."""
