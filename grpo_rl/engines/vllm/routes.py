"""The experts that vLLM's routers choose for each token, recorded on a CPU. For vLLM 0.32.

vLLM records them itself with its second model runner alone, which a CPU does not have. Here they lie next to the KV
cache, a row for each of its slots: a prompt that several requests share has its rows once, as its keys and values.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.v1.kv_cache_interface import FullAttentionSpec

from grpo_rl.data.group import NO_ROUTE
from grpo_rl.engines.vllm.sampling import ROUTES_KEY


class RouteRecorder:
    """Records the routes of a worker's model, and keeps those of finished requests until they are asked for.

    Raises:
        ValueError: the model has no experts, or no layer that attends to all tokens.
    """

    def __init__(self, runner: Any) -> None:
        layers = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        groups = runner.kv_cache_config.kv_cache_groups
        whole = [i for i, group in enumerate(groups) if type(group.kv_cache_spec) is FullAttentionSpec]
        if not layers or not whole:
            lack = "experts" if not layers else "layer that attends to all tokens"
            raise ValueError(f"policy.router_replay=true: vLLM's model has no {lack}; set it to false")
        self._runner, self._group = runner, whole[0]
        self._layer_name = groups[self._group].layer_names[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        slots, count = runner.kv_cache_config.num_blocks * self._block_size, layers[0].moe_config.experts_per_token
        self._rows = torch.zeros(
            (slots, runner.model_config.hf_text_config.num_hidden_layers, count),
            dtype=torch.int8 if max(layer.moe_config.num_logical_experts for layer in layers) <= 128 else torch.int16,
        )
        self._finished: dict[tuple[str, int], Tensor] = {}
        self._taken: set[str] = set()  # requests
        self._forgotten: set[str] = set()  # keys of requests whose end has not reached this worker yet
        for layer in layers:
            layer.router.set_capture_fn(functools.partial(self._record, layer.layer_id))
        execute = runner.execute_model

        def execute_and_keep(scheduled: Any, *args: Any, **keywords: Any) -> Any:
            for request in scheduled.finished_req_ids:  # before their blocks are given to others
                if request not in self._taken:
                    self._keep(request)
                self._taken.discard(request)
            if self._forgotten:
                going_on = runner.requests.keys() - scheduled.finished_req_ids
                self._forgotten &= {self._key(request) for request in going_on}
            return execute(scheduled, *args, **keywords)

        runner.execute_model = execute_and_keep

    def _record(self, number: int, chosen: Tensor) -> None:
        slots = get_forward_context().slot_mapping if is_forward_context_available() else None
        if isinstance(slots, dict) and self._layer_name in slots:
            rows = slots[self._layer_name][: len(chosen)]
            known = rows >= 0  # the others are padding
            self._rows[rows[known], number] = chosen[: len(rows)][known].to(self._rows.dtype)

    def _keep(self, request: str, only: str | None = None) -> bool:
        """Keeps the routes of a request if they will be asked for; returns whether."""
        state = self._runner.requests.get(request)
        key, siblings = _asked(state)
        is_asked_for = key is not None and key not in self._forgotten and only in (None, key)
        if is_asked_for:
            blocks = torch.tensor(state.block_ids[self._group])
            slots = (blocks[:, None] * self._block_size + torch.arange(self._block_size)).flatten()
            # vLLM numbers the responses to one prompt in front of their request's name.
            self._finished[key, int(request.partition("_")[0]) if siblings > 1 else 0] = self._rows[slots]
        return is_asked_for

    def take(self, key: str, lengths: Sequence[int]) -> list[Tensor]:
        """The routes of a request's responses with their prompts, [length, L, K]; the last token of each has none."""
        for request in self._runner.requests:  # those that finished in the last step are not known to the worker yet
            if self._keep(request, key):
                self._taken.add(request)
        taken = []
        for number, length in enumerate(lengths):
            rows = self._finished.pop((key, number))[: length - 1]
            taken.append(torch.cat([rows, rows.new_full((1, *rows.shape[1:]), NO_ROUTE)]))
        return taken

    def forget(self, keys: Sequence[str]) -> None:
        """Keeps no routes of these requests: they are aborted, or no one waits for them.

        An abort has to reach vLLM first, so that none of them begins any more.
        """
        self._finished = {key: rows for key, rows in self._finished.items() if key[0] not in keys}
        self._forgotten |= set(keys) & {self._key(request) for request in self._runner.requests}

    def _key(self, request: str) -> str | None:
        return _asked(self._runner.requests[request])[0]


def _asked(state: Any) -> tuple[str | None, int]:
    """The key under which a request's routes will be asked for, if they will, and the number of its siblings."""
    arguments = (state and state.sampling_params and state.sampling_params.extra_args) or {}
    key, siblings = arguments.get(ROUTES_KEY, (None, 0))
    return key, siblings
