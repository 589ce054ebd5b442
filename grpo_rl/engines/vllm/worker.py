"""Our extension of vLLM's workers: they take weights by their checkpoint names, and prove what they hold.

vLLM mixes the class into its worker by its name, in each of its processes.
"""

from collections.abc import Iterable
from typing import Any, SupportsInt

import torch
from torch import Tensor

import grpo_rl.engines.vllm.registered  # noqa: F401

# isort: split
from grpo_rl.engines.base import ADAPTER_NAME
from grpo_rl.engines.fingerprint import batch_on, fingerprint
from grpo_rl.engines.vllm.cpu import refresh_heads
from grpo_rl.engines.vllm.drafts import DraftMeter
from grpo_rl.engines.vllm.held import held_digest, is_plain, module_of, shard_fingerprint, write_in_place
from grpo_rl.engines.vllm.lora import held_factor_fingerprint, hold_adapter
from grpo_rl.engines.vllm.own_forms import refresh_convolutions
from grpo_rl.engines.vllm.routes import RouteRecorder


class WorkerExtension:
    """Methods of vLLM's workers, called by `collective_rpc`; arguments are plain, as they travel between processes."""

    model_runner: Any  # the worker's, as those without a comment
    cache_config: Any
    _loaded: torch.nn.Module | None = None
    """The model, once vLLM has loaded weights into it by their names, if the next can be written over them."""
    _routes: RouteRecorder
    _drafts: DraftMeter
    weight_transfer_engine: Any
    _weight_update_active: bool

    def receive_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Loads the weights in place; those that do not come stay."""
        model = self.model_runner.get_model()
        if model is self._loaded:
            write_in_place(model, weights)
            return
        self.model_runner.reload_weights(weights_iterator=iter(weights))
        refresh_heads(model)
        refresh_convolutions(model)
        self._loaded = model if is_plain(model) else None

    def receive_adapter(self, factors: dict[str, Tensor]) -> None:
        """Puts the adapter in the place of the one before."""
        hold_adapter(self.model_runner, factors)

    def hold_received_adapter(self) -> None:
        """Puts an adapter that came with the last update in the place of the one before."""
        if adapter := self.weight_transfer_engine.adapter:
            hold_adapter(self.model_runner, adapter)
            self.weight_transfer_engine.adapter = {}

    def abandon_weight_update(self) -> None:
        """Gives up the update under way, so that another can begin."""
        self._weight_update_active = False
        if hasattr(self.weight_transfer_engine, "abandon"):  # vLLM's own transfers have nothing to give up
            self.weight_transfer_engine.abandon()

    def cache_bytes(self) -> int:
        """Bytes of the KV cache on a GPU, as given to vLLM or as it counted them when it started; 0 on a CPU."""
        if not torch.cuda.is_available():
            return 0
        # Given: by us, or by vLLM's own plan of an earlier start (VLLM_ENABLE_STARTUP_PLAN), which then counts nothing.
        given = self.cache_config.kv_cache_memory_bytes
        size = int(given or getattr(self, "available_kv_cache_memory_bytes", 0))
        if size <= 0:
            raise RuntimeError("vLLM does not say how large its KV cache is: an engine in this one's place needs it")
        return size

    def record_routes(self) -> None:
        """Records the experts of each token from now on."""
        self._routes = RouteRecorder(self.model_runner)

    def take_routes(self, key: str, lengths: list[int]) -> list[tuple[bytes, str, list[int]]]:
        """Bytes, dtype and shape of each result of :meth:`grpo_rl.engines.vllm.routes.RouteRecorder.take`."""
        taken = [rows.numpy() for rows in self._routes.take(key, lengths)]
        return [(rows.tobytes(), str(rows.dtype), list(rows.shape)) for rows in taken]

    def forget_routes(self, keys: list[str]) -> None:
        """See :meth:`grpo_rl.engines.vllm.routes.RouteRecorder.forget`."""
        self._routes.forget(keys)

    def meter_drafts(self) -> None:
        """Limits and counts drafts from now on."""
        self._drafts = DraftMeter(self.model_runner)

    def draft_metrics(self) -> dict[str, float]:
        """See :meth:`grpo_rl.engines.vllm.drafts.DraftMeter.metrics`."""
        return self._drafts.metrics()

    def held_fingerprints(self, shapes: dict[str, list[int]], dtype: str, as_digests: bool) -> dict[str, int]:
        """This worker's share of the fingerprint of each checkpoint tensor, 0 where another worker counts it.

        With ``as_digests`` tensors other than adapters have digests, which need not be read back.
        """
        model, held_as = self.model_runner.get_model(), getattr(torch, dtype)
        last_read: dict[tuple[str, str], Tensor] = {}
        shares: dict[str, SupportsInt] = {}
        batch = batch_on(next(model.parameters()).device)
        for name, shape in shapes.items():
            if factor := ADAPTER_NAME.fullmatch(name):
                module, index = module_of(model, factor["layer"])
                shares[name] = held_factor_fingerprint(self.model_runner, module, factor["part"], index)
            elif as_digests:
                shares[name] = held_digest(model, name, held_as)
            else:
                of = batch.add if batch else fingerprint
                shares[name] = shard_fingerprint(model, name, torch.Size(shape), held_as, last_read, of)
        return {name: int(share) for name, share in shares.items()}
