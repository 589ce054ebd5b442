"""Agents: programs that call the policy as an OpenAI endpoint, and the record of the tokens of their calls."""
