"""TaskTeachers: a teacher for each task of a mixture."""

from collections.abc import Callable, Mapping, Sequence

import torch
from typing_extensions import override

from grpo_rl.data.group import Group
from grpo_rl.policies.divergence import SeveralTeachers
from grpo_rl.policies.policy import Reference


class TaskTeachers(Reference):
    """The reference of a mixture whose tasks have teachers of their own.

    Args:
        teachers: by the task's name.
        by_task: the indices of those of some groups that are of each task.
    """

    def __init__(
        self,
        teachers: Mapping[str, Reference],
        by_task: Callable[[Sequence[Group]], Mapping[str, Sequence[int]]],
    ) -> None:
        self._teachers, self._by_task = teachers, by_task

    @override
    def add_log_probs(self, groups: Sequence[Group], max_tokens: int) -> list[Group]:
        by_id = {}
        for name, own in self._by_task(groups).items():
            if own:
                found = self._teachers[name].add_log_probs([groups[i] for i in own], max_tokens)
                by_id |= {group.group_id: group for group in found}
        return [by_id[group.group_id] for group in groups]

    @override
    def distributions(self, groups: Sequence[Group], device: torch.device) -> SeveralTeachers:
        parts, whose = [], [0] * len(groups)
        for name, own in self._by_task(groups).items():
            if own:
                for i in own:
                    whose[i] = len(parts)
                parts.append(self._teachers[name].distributions([groups[i] for i in own], device))
        lengths = torch.tensor([len(group.response_ids) for group in groups])
        return SeveralTeachers(parts, torch.tensor(whose).repeat_interleave(lengths).to(device))
