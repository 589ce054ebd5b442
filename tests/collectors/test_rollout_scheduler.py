"""Groups in flight: nothing is lost or twice, and the end is clean."""

import asyncio
from itertools import chain

import pytest
from simulation import virtual_time

from grpo_rl.collectors.rollout_scheduler import RolloutScheduler, StalenessManager


def scheduler_of(answer, groups, bound=1, per_step=2):
    numbers = iter(range(groups))
    return RolloutScheduler(StalenessManager(per_step, bound), lambda: next(numbers, None), answer)


async def batches(scheduler, train_s=1.0):
    out = []
    while groups := await scheduler.batch():
        out.append(groups)
        await asyncio.sleep(train_s)
        scheduler.advance(scheduler.staleness.version + 1)
    scheduler.staleness.check()
    await scheduler.close()
    return out


def test_every_group_is_handed_out_once_in_whole_batches_and_a_rest():
    async def answer(number):
        await asyncio.sleep(number % 3)
        return number

    out = virtual_time.run(batches(scheduler_of(answer, groups=7)))
    assert [len(batch) for batch in out] == [2, 2, 2, 1] and sorted(chain.from_iterable(out)) == list(range(7))


def test_closing_ends_what_is_in_flight():
    ended = []

    async def answer(number):
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(number)

    async def closed():
        scheduler = scheduler_of(answer, groups=9)
        scheduler.fill()
        await asyncio.sleep(1)
        await scheduler.close()

    virtual_time.run(closed())
    assert sorted(ended) == [0, 1, 2, 3]


def test_a_scheduler_goes_on_where_another_stopped_with_what_was_answered_and_what_was_not():
    asked = []

    async def answer(number):
        asked.append(number)
        await asyncio.sleep(1.0 if number % 2 else 100.0)
        return -number

    async def first():
        scheduler = scheduler_of(answer, groups=8)
        filling = asyncio.create_task(scheduler.batch())
        await asyncio.sleep(0.5)
        assert [item[1:] for item in scheduler.open()] == [(0, None), (1, None), (2, None), (3, None)]
        assert await filling == [-1, -3]
        scheduler.advance(scheduler.staleness.version + 1)  # 4 and 5 are started under version 1
        await asyncio.sleep(2.0)
        left = scheduler.open()
        await scheduler.close()
        return left

    left = virtual_time.run(first())
    assert left == [(0, 0, None), (0, 2, None), (1, 4, None), (1, 5, -5)]

    async def second():
        scheduler = RolloutScheduler(StalenessManager(2, 1, version=1), iter([6, 7, None]).__next__, answer)
        scheduler.staleness.trained = scheduler.staleness.started = 2
        scheduler.reopen(left)
        assert scheduler.open() == [(1, 5, -5), (1, 0, None), (1, 2, None), (1, 4, None)], (
            "asked again under the new weights"
        )
        return await batches(scheduler)

    asked.clear()
    out = virtual_time.run(second())
    assert sorted(chain.from_iterable(out)) == [-7, -6, -5, -4, -2, 0] and asked == [0, 2, 4, 6, 7]


def test_where_all_waits_for_nothing_virtual_time_says_so():
    async def forever():
        await asyncio.Event().wait()

    with pytest.raises(virtual_time.LockedUpError, match="nothing is scheduled"):
        virtual_time.run(forever())
