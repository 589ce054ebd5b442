"""Settings as YAML, each explained in its place; `grpo_rl.settings` reads them."""
