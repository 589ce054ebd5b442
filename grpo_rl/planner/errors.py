"""The planner's own error."""

from __future__ import annotations


class NotPlannedError(ValueError):
    """A model that can be trained is of a kind whose memory is not counted, so that there is no plan; names it."""
