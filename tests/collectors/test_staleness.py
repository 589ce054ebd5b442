"""The staleness manager keeps the bound on staleness in whatever order groups end, loses none and can't lock up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_rl.collectors.rollout_scheduler import StalenessManager


def test_a_step_waits_for_the_group_whose_turn_it_is():
    staleness = StalenessManager(groups_per_step=1, max_staleness=1)
    slow, quick = staleness.start(), staleness.start()
    staleness.finish(quick)
    assert staleness.take() == [quick]  # the slow one may still be trained in the next step
    staleness.advance(1)
    other = staleness.start()
    staleness.finish(other)
    assert staleness.take() is None
    staleness.finish(slow)
    assert staleness.take() == [slow]


def test_a_step_leaves_no_more_for_a_later_one_than_that_has_room_for():
    # Three of version 0, of which two have to be trained by the end of the next step: one of them now.
    staleness = StalenessManager(groups_per_step=2, max_staleness=1)
    first = [staleness.start() for _ in range(4)]
    for group in first[:2]:
        staleness.finish(group)
    assert staleness.take() == first[:2]
    staleness.advance(1)
    new = [staleness.start() for _ in range(2)]
    for group in (first[2], *new):
        staleness.finish(group)
    assert staleness.take() is None  # with one of the new ones beside the third, the fourth would come too late
    staleness.finish(first[3])
    assert staleness.take() == first[2:]


def test_the_last_step_takes_what_is_left():
    staleness = StalenessManager(groups_per_step=4, max_staleness=0)
    started = [staleness.start() for _ in range(3)]
    staleness.finish(started[0])
    staleness.drop(started[1], "failed")
    assert staleness.take(last=True) is None
    staleness.finish(started[2])
    assert staleness.take() is None and staleness.take(last=True) == [started[0], started[2]]
    assert staleness.take(last=True) is None
    assert staleness.dropped == {"failed": 1}
    staleness.check()


@pytest.mark.slow
@given(data=st.data(), groups=st.integers(1, 4), bound=st.integers(0, 3))
def test_whatever_happens_no_group_is_too_old_lost_or_twice_and_the_run_goes_on(data, groups, bound):
    staleness, trained = StalenessManager(groups, bound), []
    for _ in range(data.draw(st.integers(1, 60))):
        running = [group for group in staleness.open if not group.finished]
        batch = staleness.take()
        if batch is not None:
            assert len(batch) == groups
            assert all(staleness.version - group.version <= bound for group in batch)
            trained += batch
            # Others go on while the step is trained.
            for group in data.draw(st.lists(st.sampled_from(running), unique=True)) if running else []:
                staleness.finish(group)
            while staleness.room() and data.draw(st.booleans()):
                staleness.start()
            staleness.advance(staleness.version + 1)
        elif staleness.room():
            staleness.start()
        else:
            assert running, "nothing may be started, nothing runs, and no batch is ready: locked up"
            group = data.draw(st.sampled_from(running))
            act = data.draw(st.sampled_from(["finish", "finish", "finish", "restart", "drop"]))
            if act == "finish":
                staleness.finish(group)
            elif act == "restart":
                staleness.restart(group)
            else:
                staleness.drop(group, "lost")
        staleness.check()
    assert len(set(map(id, trained))) == len(trained) == staleness.trained
