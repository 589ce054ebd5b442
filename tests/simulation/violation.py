"""Violation: the error of an invariant that does not hold."""


class Violation(AssertionError):
    """Something is not true that has to be."""


def check_equal(found: object, expected: object, what: str) -> None:
    """Raises Violation where two values differ."""
    if found != expected:
        raise Violation(f"{what}: {found}, and not {expected}")
