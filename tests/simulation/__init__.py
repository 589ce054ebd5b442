"""Simulates runs in which everything fails: the real code of an asynchronous run, in virtual time, by a seed."""
