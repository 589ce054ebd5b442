"""Tasks: what is asked, and what an answer is worth."""
