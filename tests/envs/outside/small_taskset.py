"""Tasksets and environments of verifiers, small ones for tests; imported where verifiers is installed."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward
    async def shape(self, task: SumData, trace: vf.Trace) -> dict[str, float]:
        return {"brief": 0.5 * (len(trace.last_reply) <= 2), "asked": float("+" in task.prompt_text)}

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)

    @vf.stop
    async def gives_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class Sums(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self):
        for n in range(10):
            yield SumTask(SumData(prompt=f"{n} + 1?", system_prompt="Add.", answer=str(n + 1)), self.config.task)


__all__ = ["Sums"]
