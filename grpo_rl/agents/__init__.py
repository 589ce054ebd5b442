"""Agents: programs that speak to the policy as to an OpenAI endpoint, and the record of the tokens of their calls."""
