"""What a step trains on: groups of responses, their advantages, the buffer, and the split into micro-batches."""
