"""The data of a training step: groups of responses, their advantages, the buffer, and the split into micro-batches."""
