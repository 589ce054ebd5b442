"""The parts of a simulated run: collector, weight sync, fleet and buffer are the real ones."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from unittest import mock

from grpo_rl.cluster import engine_actors
from grpo_rl.cluster.fleet import Fleet, FleetEngine, FleetMember
from grpo_rl.collectors import asynchronous
from grpo_rl.data.batching import MicroBatching
from grpo_rl.data.buffer import GroupBuffer
from grpo_rl.engines.base import Sampling
from grpo_rl.run.parts import Parts
from grpo_rl.training.micro_batches import WithinMemory
from grpo_rl.weights import push, shared_memory
from simulation.clock import Executor
from simulation.engines import DEADLINE_S, SimulatedActor, SimulatedEngine
from simulation.stand_ins import Environment, Model, Optimizer, Schedules
from simulation.world import World

BUCKET_BYTES = 256
"""Memory for weights: the model comes in two buckets."""


@contextmanager
def simulated_ray(world: World) -> Iterator[None]:
    """Has engines run in simulated actors; ends after everything that calls them, or Ray would start a cluster."""

    def start(make: Callable[[], SimulatedEngine]) -> SimulatedActor:
        actor = SimulatedActor(make, len(world.actors) % 2, world)  # on one of two nodes
        world.actors.append(actor)
        return actor

    actor_class = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=start))
    with (
        mock.patch.object(engine_actors, "_EngineActor", actor_class),
        mock.patch.object(engine_actors, "ray", SimpleNamespace(kill=SimulatedActor.die)),
    ):
        yield


@contextmanager
def simulated_parts(world: World, collected: int) -> Iterator[tuple[Parts, asynchronous.AsyncCollector]]:
    """The parts of a run, and its collector itself, as `grpo_rl.assembly.run` builds them.

    Args:
        collected: responses that were sampled before, when the run is resumed.
    """
    process, setup = world.process, world.setup
    env = Environment(world)

    async def start(number: int) -> FleetMember:
        name = f"engine {number}"
        make = partial(SimulatedEngine, name, world)
        return await engine_actors.launch(name, make, deadline_s=world.engine_start_s)

    with ExitStack() as stack:
        executor = lambda **_: Executor(process, env.score_s)  # noqa: E731
        stack.enter_context(mock.patch.object(asynchronous, "ThreadPoolExecutor", executor))
        fleet = Fleet(start, setup.engines)
        try:
            process.run(fleet.start())
        except Exception:
            process.run(fleet.close())
            raise
        transport = partial(shared_memory.SharedMemoryTransport, bucket_bytes=BUCKET_BYTES, deadline_s=DEADLINE_S)
        engine = FleetEngine(fleet, process, transport)
        stack.callback(engine.close)
        stack.callback(engine._transport.close)  # a killed process keeps no memory
        model = Model()
        weights = push.WeightSync(model, engine)
        collector = asynchronous.AsyncCollector(
            env, engine, Sampling(), setup.responses, weights, setup.max_staleness, collected, setup.drops_zero_variance
        )
        stack.callback(collector.shutdown)
        policy, optimizer = SimpleNamespace(model=model), Optimizer(model)
        yield (
            Parts(
                env=env,
                tokenizer=None,
                policy=policy,
                reference=None,
                optimizer=optimizer,
                engine=engine,
                weights=weights,
                collector=collector,
                schedules=Schedules(),
                loss=None,
                compute_advantages=None,
                buffer=GroupBuffer(setup.num_envs, setup.groups_per_batch),
                within_memory=WithinMemory(policy, MicroBatching(1), optimizer.clear_gradients),  # nothing is scored
                needs_old_log_probs=False,
            ),
            collector,
        )
