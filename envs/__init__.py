"""Tasks: prompts, and the rewards of responses to them."""
