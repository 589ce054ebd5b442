"""What this machine could do at its best, and how near a step came."""
