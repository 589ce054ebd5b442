"""Groups from the recorded sequences of agents' sessions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_rl.agents.recorder import Recorded
from grpo_rl.collectors.multi_turn import Trajectory, group_of_trajectories
from grpo_rl.data.group import Group
from grpo_rl.data.prefix_tree import common_length
from grpo_rl.envs.base import Prompt
from grpo_rl.envs.chat import Dialog


def group_of_sequences(prompt: Prompt, sequences: Sequence[Recorded]) -> Group:
    """The sequences about one row as a group, not yet rewarded.

    The group's prompt is what all of their prompts begin with. The rest of each is the beginning of its response, which
    is not trained on.

    >>> from grpo_rl.engines.base import Samples
    >>> short, long = (Recorded([1, 2, *rest], [], False) for rest in ([], [3]))
    >>> for one in (short, long):
    ...     one.add_sampled(Samples.from_lists([[5]], [[-0.5]], [False], version=3), True)
    >>> group = group_of_sequences(Prompt(0, 0, "?", torch.tensor([9])), [short, long])
    >>> group.prompt_ids.tolist(), group.response_ids.tolist(), group.trainable.tolist(), group.versions.tolist()
    ([1, 2], [5, 3, 5], [True, False, True], [3, 3, 3])
    """
    prompts = [torch.tensor(sequence.prompt_ids).numpy() for sequence in sequences]
    shared = min(common_length(prompts[0], other) for other in prompts)
    trajectories = [_trajectory(sequence, shared) for sequence in sequences]
    whole = torch.tensor(sequences[0].prompt_ids[:shared], dtype=torch.long)
    return group_of_trajectories(replace(prompt, ids=whole), trajectories)


def _trajectory(sequence: Recorded, shared: int) -> Trajectory:
    rest = sequence.prompt_ids[shared:]
    version = sequence.versions[0] if sequence.versions else 0
    return Trajectory(
        row={},
        where="",
        prompt_ids=sequence.prompt_ids[:shared],
        dialog=Dialog([]),
        ids=[*rest, *sequence.ids],
        log_probs=[*[0.0] * len(rest), *sequence.log_probs],
        versions=[*[version] * len(rest), *sequence.versions],
        kept=[(None, len(rest)), *sequence.kept],
        trainable=[*[False] * len(rest), *sequence.trainable],
        routes=sequence.routes,
        truncated=sequence.truncated,
    )
