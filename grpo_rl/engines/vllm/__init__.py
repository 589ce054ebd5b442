"""vLLM as an engine, in the training process and in processes of its own."""
