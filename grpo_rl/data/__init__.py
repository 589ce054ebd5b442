"""What a step trains on: groups of responses, their advantages, and the buffer that batches them."""
