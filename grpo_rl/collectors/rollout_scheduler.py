"""Flow: groups are sampled while others are trained on, under the ledger's bound; nothing waits that need not.

It knows neither engines nor prompts: whoever makes it says how the next group is asked for and answered. So the same
code runs over real engines and in simulated time (`grpo_rl.planner.simulator`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, TypeVar

from grpo_rl.collectors.staleness import Ledger, Ticket
from grpo_rl.engines.base import EngineLostError

Asked = TypeVar("Asked")
Answered = TypeVar("Answered")


class Dropped(Exception):
    """A group will never be complete.

    Args:
        reason: a word or two, by which such groups are counted.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Flow(Generic[Asked, Answered]):
    """Keeps as many groups in flight as the bound on staleness allows, and hands out batches.

    Args:
        ledger: whose bound holds.
        ask: the next group to sample; None when there is none any more.
        answer: samples and rewards it. Raises EngineLostError where it has to be sampled again, and Dropped where it
            has come to nothing; any other error ends the flow and reaches :meth:`batch`.
    """

    def __init__(
        self, ledger: Ledger, ask: Callable[[], Asked | None], answer: Callable[[Asked], Awaitable[Answered]]
    ) -> None:
        self.ledger = ledger
        self.resampled = 0
        """Groups sampled again so far, as an engine died under them."""
        self._ask, self._answer = ask, answer
        self._asked_all = False
        self._asked: dict[int, Asked] = {}
        self._answered: dict[int, Answered] = {}
        self._again: deque[Asked] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None
        self._news = asyncio.Event()

    def fill(self) -> None:
        """Starts what may be started; called whenever there may be room."""
        while not self._asked_all and self.ledger.room() > 0:
            asked = self._again.popleft() if self._again else self._ask()
            if asked is None:
                self._asked_all = True
                self._news.set()
                return
            ticket = self.ledger.start()
            self._asked[ticket.number] = asked
            task = asyncio.create_task(self._sample(ticket, asked))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def open(self) -> list[tuple[int, Asked, Answered | None]]:
        """Version, question and answer of each group that is neither handed out nor dropped; None: in flight."""
        open_tickets = [(ticket.version, self._asked[ticket.number], ticket.number) for ticket in self.ledger.open]
        waiting = [(self.ledger.version, asked, None) for asked in self._again]
        return [
            (version, asked, None if number is None else self._answered.get(number))
            for version, asked, number in [*open_tickets, *waiting]
        ]

    def reopen(self, groups: Iterable[tuple[int, Asked, Answered | None]]) -> None:
        """Goes on with the groups of :meth:`open`: those in flight are sampled again, before anything else is."""
        for version, asked, answered in groups:
            if answered is None:
                self._again.append(asked)
                continue
            ticket = self.ledger.start()
            ticket.version = version
            self._asked[ticket.number], self._answered[ticket.number] = asked, answered
            self.ledger.finish(ticket)

    async def _sample(self, ticket: Ticket, asked: Asked) -> None:
        try:
            while True:
                try:
                    self._answered[ticket.number] = await self._answer(asked)
                except EngineLostError:
                    self.ledger.restart(ticket)
                    self.resampled += 1
                else:
                    self.ledger.finish(ticket)
                    break
        except Dropped as drop:
            self.ledger.drop(ticket, drop.reason)
            del self._asked[ticket.number]
        except Exception as error:
            self._error = error
        try:
            self.fill()  # in the place of what was dropped
        except Exception as error:
            self._error = error
        self._news.set()

    async def batch(self) -> list[Answered]:
        """The groups of the next step, as soon as the ledger gives them; fewer at the end, and then none.

        Raises:
            Exception: what ended the sampling of a group.
        """
        self.fill()
        while True:
            if self._error:
                raise self._error
            tickets = self.ledger.take(last=self._asked_all)
            if tickets is not None:
                return [self._hand_out(ticket) for ticket in tickets]
            if self._asked_all and not self.ledger.open:
                return []
            self._news.clear()
            await self._news.wait()

    def _hand_out(self, ticket: Ticket) -> Answered:
        del self._asked[ticket.number]
        return self._answered.pop(ticket.number)

    def advance(self) -> None:
        """The step is over and engines hold the next version: there is room again."""
        self.ledger.advance()
        self.fill()

    async def close(self) -> None:
        """Ends what is in flight."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
