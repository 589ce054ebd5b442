"""Endpoints that serve this machine alone: where they listen, and by which names they may be called."""

LOOPBACK = "127.0.0.1"


def names_this_machine(host: str) -> bool:
    """True if a request's ``Host`` is this machine: a web page can point a name of its own here, and read what it gets.

    >>> names_this_machine("127.0.0.1:8000"), names_this_machine("localhost"), names_this_machine("evil.example:8000")
    (True, True, False)
    """
    return host.split(":")[0] in (LOOPBACK, "localhost")
