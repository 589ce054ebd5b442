"""Tasks: what is asked, and what a response is worth."""
