"""What a response says, read out of its text, and whether it is right; without torch."""
