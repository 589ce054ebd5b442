"""An engine turns prompts into samples."""
