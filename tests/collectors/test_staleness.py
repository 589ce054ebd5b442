"""The ledger keeps the bound on staleness whatever the order in which groups end, loses none, and can't lock up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.collectors.staleness import Ledger


@pytest.mark.parametrize(("groups", "bound"), [(0, 1), (2, -1)])
def test_a_step_without_groups_and_a_negative_bound_are_refused(groups, bound):
    with pytest.raises(ValueError, match=r"train\.max_staleness"):
        Ledger(groups, bound)


def test_without_staleness_nothing_is_started_while_a_step_is_trained():
    ledger = Ledger(groups_per_step=2, max_staleness=0)
    tickets = [ledger.start() for _ in range(2)]
    assert ledger.room() == 0 and ledger.take() is None
    for ticket in tickets:
        ledger.finish(ticket)
    assert ledger.take() == tickets and ledger.room() == 0
    ledger.advance()
    assert ledger.room() == 2


def test_a_step_waits_for_the_group_whose_turn_it_is():
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    slow, quick = ledger.start(), ledger.start()
    ledger.finish(quick)
    assert ledger.take() == [quick]  # the slow one may still be trained in the next step
    ledger.advance()
    other = ledger.start()
    ledger.finish(other)
    assert ledger.take() is None
    ledger.finish(slow)
    assert ledger.take() == [slow]


def test_a_step_leaves_no_more_for_a_later_one_than_that_has_room_for():
    # Three of version 0, of which two have to be trained by the end of the next step: one of them now.
    ledger = Ledger(groups_per_step=2, max_staleness=1)
    first = [ledger.start() for _ in range(4)]
    for ticket in first[:2]:
        ledger.finish(ticket)
    assert ledger.take() == first[:2]
    ledger.advance()
    new = [ledger.start() for _ in range(2)]
    for ticket in (first[2], *new):
        ledger.finish(ticket)
    assert ledger.take() is None  # with one of the new ones beside the third, the fourth would come too late
    ledger.finish(first[3])
    assert ledger.take() == first[2:]


def test_a_group_sampled_again_is_of_the_present_version_and_counts_once():
    ledger = Ledger(groups_per_step=1, max_staleness=1)
    lost, kept = ledger.start(), ledger.start()
    ledger.finish(kept)
    assert ledger.take() == [kept]
    ledger.advance()
    ledger.restart(lost)
    assert lost.version == 1 and ledger.started == 2
    ledger.check()


def test_the_last_step_takes_what_is_left():
    ledger = Ledger(groups_per_step=4, max_staleness=0)
    tickets = [ledger.start() for _ in range(3)]
    ledger.finish(tickets[0])
    ledger.drop(tickets[1], "failed")
    assert ledger.take(last=True) is None
    ledger.finish(tickets[2])
    assert ledger.take() is None and ledger.take(last=True) == [tickets[0], tickets[2]]
    assert ledger.take(last=True) is None
    assert ledger.dropped == {"failed": 1}
    ledger.check()


@given(data=st.data(), groups=st.integers(1, 4), bound=st.integers(0, 3))
def test_whatever_happens_no_group_is_too_old_lost_or_twice_and_the_run_goes_on(data, groups, bound):
    ledger, trained = Ledger(groups, bound), []
    for _ in range(data.draw(st.integers(1, 60))):
        running = [ticket for ticket in ledger.open if not ticket.finished]
        batch = ledger.take()
        if batch is not None:
            assert len(batch) == groups
            assert all(ledger.version - ticket.version <= bound for ticket in batch)
            trained += batch
            # Others go on while the step is trained.
            for ticket in data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []:
                ledger.finish(ticket)
            while ledger.room() and data.draw(st.booleans()):
                ledger.start()
            ledger.advance()
        elif ledger.room():
            ledger.start()
        else:
            assert running, "nothing may be started, nothing runs, and no batch is ready: locked up"
            ticket = data.draw(st.sampled_from(running))
            act = data.draw(st.sampled_from(["finish", "finish", "finish", "restart", "drop"]))
            if act == "finish":
                ledger.finish(ticket)
            elif act == "restart":
                ledger.restart(ticket)
            else:
                ledger.drop(ticket, "lost")
        ledger.check()
    assert len(set(map(id, trained))) == len(trained) == ledger.trained
