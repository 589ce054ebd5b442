"""Ledger: which groups may be started, which are trained on next, and what became of each, under a bound on staleness.

Letters: B groups of a training step, S the bound on staleness, in policy versions.

A group that was started under version v has its turn no later than in the step that trains version v + S: no token of
it is older than S versions then. Two rules keep that true without ever throwing an answer away for being late:

- No more than (S + 1) B groups are open at a time, as in AReaL, https://arxiv.org/abs/2505.24298, section 5.1, eq. 3.
- A step takes the groups whose turn comes first among those that are finished, and waits while it would leave more
  groups for some later step than that step has room for (the feasibility of earliest deadline first).

So sampling waits only at the bound, and training only for a batch, or for an answer that is S steps late.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(eq=False)
class Ticket:
    """A group from its start until it is trained on or dropped.

    Args:
        number: in the order of starting.
        version: of the weights that it was started under.
    """

    number: int
    version: int
    finished: bool = False


@dataclass
class Ledger:
    """The account of groups; it holds numbers, not groups, and never waits.

    Args:
        groups_per_step: B.
        max_staleness: S; with 0 no group is sampled while another is trained on.
        version: of the weights that the next step trains.

    Raises:
        ValueError: no group in a step, or a bound below 0.

    With room for two steps, the first batch is trained while the second is sampled:

    >>> ledger = Ledger(groups_per_step=2, max_staleness=1)
    >>> tickets = [ledger.start() for _ in range(ledger.room())]
    >>> for ticket in tickets[1:]:
    ...     ledger.finish(ticket)
    >>> [ticket.number for ticket in ledger.take()], ledger.room()
    ([1, 2], 0)
    >>> ledger.advance(); ledger.room(), ledger.take()
    (2, None)
    """

    groups_per_step: int
    max_staleness: int
    version: int = 0
    started: int = 0
    trained: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    open: list[Ticket] = field(default_factory=list)
    """Started, and neither trained on nor dropped, in the order of starting."""
    _in_training: int = 0

    def __post_init__(self) -> None:
        if self.groups_per_step < 1 or self.max_staleness < 0:
            raise ValueError(
                f"{self.groups_per_step} groups a step with train.max_staleness={self.max_staleness}; a step needs a "
                "group, and the bound is 0 or more"
            )

    def room(self) -> int:
        """How many groups may be started now."""
        held = len(self.open) + self._in_training
        return (self.max_staleness + 1) * self.groups_per_step - held

    def start(self) -> Ticket:
        """A new group, which is about to be sampled under the present version."""
        assert self.room() > 0, "no group may be started now"
        ticket = Ticket(self.started, self.version)
        self.started += 1
        self.open.append(ticket)
        return ticket

    def restart(self, ticket: Ticket) -> None:
        """The group's answers are lost, and it is sampled again; it has been started once all the same."""
        self.open.remove(ticket)
        ticket.version, ticket.finished = self.version, False
        self.open.append(ticket)

    def finish(self, ticket: Ticket) -> None:
        """The group is complete and waits to be trained on."""
        ticket.finished = True

    def drop(self, ticket: Ticket, reason: str) -> None:
        """The group will not be trained on."""
        self.open.remove(ticket)
        self.dropped[reason] += 1

    def take(self, last: bool = False) -> list[Ticket] | None:
        """The groups of the next step, those first whose turn comes first; None while it has to wait.

        Args:
            last: no group will be started any more, so that fewer than B are a batch once all are finished.
        """
        finished = [ticket for ticket in self.open if ticket.finished]
        everything = last and len(finished) == len(self.open) > 0
        if len(finished) < self.groups_per_step and not everything:
            return None
        finished.sort(key=lambda ticket: (ticket.version, ticket.number))
        chosen = finished[: self.groups_per_step]
        if any(self._left(chosen, later) > later * self.groups_per_step for later in range(self.max_staleness + 1)):
            return None
        for ticket in chosen:
            self.open.remove(ticket)
        self._in_training += len(chosen)
        self.trained += len(chosen)
        return chosen

    def _left(self, chosen: list[Ticket], later: int) -> int:
        """Groups that would still be open, and whose turn comes within so many steps after the next."""
        taken = set(map(id, chosen))
        due = self.version + later - self.max_staleness
        return sum(ticket.version <= due and id(ticket) not in taken for ticket in self.open)

    def advance(self) -> None:
        """The step is over: engines hold the next version."""
        self.version += 1
        self._in_training = 0

    def check(self) -> None:
        """Every group that was started is open, trained on or dropped; none is twice."""
        accounted = len(self.open) + self.trained + self.dropped.total()
        assert accounted == self.started, f"{self.started} groups were started, and {accounted} are accounted for"
