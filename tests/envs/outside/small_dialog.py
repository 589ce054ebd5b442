"""A taskset of verifiers whose environment talks: it asks until the sum is right."""

import verifiers.v1 as vf
from small_taskset import SumData, SumTask


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig(max_turns=3)


class Talks(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as player:
            segment = await player.turn()
            while not segment.terminated and segment.last_reply != task.data.answer:
                segment = await player.turn([{"role": "user", "content": "Once more."}])

    async def finalize(self, task, episode):
        episode.traces[0].record_reward("patience", 0.25)


class Dialogs(vf.Taskset[SumTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield SumTask(
                SumData(prompt=[{"role": "user", "content": f"{n} + 1?"}], answer=str(n + 1)), self.config.task
            )
            n += 1


__all__ = ["Dialogs", "Talks"]
