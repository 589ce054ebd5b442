"""Tools that a policy can call in its text: how a call is written, a calculator's arithmetic, a search index."""
