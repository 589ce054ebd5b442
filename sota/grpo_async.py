"""GRPO, sampling while it trains: `python sota/grpo_async.py env.path=train.jsonl train.max_staleness=2`.

Engines run in Ray actors, on this machine or on the cluster at `ray.address`, where the trainers are actors, too. The
algorithm is that of sota/grpo.py; what differs is that weights reach engines in the middle of their answers.
"""

import grpo_rl.cluster.token  # noqa: F401, has Ray ask for a token; before torchrl, which imports ray

# isort: split
import torch
from hydra.core.hydra_config import HydraConfig

from grpo_rl.build import parts as build
from grpo_rl.build import site as build_async
from grpo_rl.losses.grpo import LOSSES
from grpo_rl.policies.hub import resolve_model
from grpo_rl.policies.policy import scored_micro_batches
from grpo_rl.run.run import Run
from grpo_rl.settings.config import main
from grpo_rl.settings.derived import micro_batching, needs_old_log_probs
from grpo_rl.weights.push import WeightSync


@main(config_name="grpo_gsm8k", mode="async")
def grpo_async(cfg):
    with build_async.make_site(cfg, resolve_model(cfg.model.name)) as site:  # which devices do what, and where
        return site.run(train, cfg, HydraConfig.get().runtime.output_dir)


def train(cfg, folder, site):
    """The run, in each of the processes that train."""
    model_folder, devices = resolve_model(cfg.model.name), site.devices
    tokenizer = build.make_tokenizer(model_folder, cfg.model.chat_template)
    env = build.make_env(cfg, tokenizer)
    loss, buffer = build.make_loss(cfg), build.make_buffer(cfg, env.task.reward_parts)
    held_out = build.eval_rows(cfg, env)

    ranks = build_async.make_ranks(cfg, site)
    with Run(cfg, env, folder, held_out, build.model_bytes(model_folder), ranks) as run:
        policy = build.make_policy(cfg, model_folder, devices, ranks)
        reference = build.make_reference(cfg, model_folder, devices, policy)
        optimizer = run.own(build.make_optimizer(cfg, policy, ranks))
        engine = run.own(build_async.make_engine(cfg, model_folder, site, ranks))  # several, which answer as one
        weights = WeightSync(policy.model, engine, ranks=ranks)

        schedules = build.make_schedules(cfg, loss, buffer, reference, policy)
        run.attach(policy, optimizer, weights, engine, schedules)
        weights.push()
        run.evaluate_before()
        collector = run.own(build_async.make_collector(cfg, env, engine, weights.version, run.collected, run.led))
        for groups in run.steps(collector):  # sampling goes on, as far as train.max_staleness allows
            with run.phase("score"):
                groups = reference.annotate(groups, cfg.train.micro_batch_tokens) if reference else groups
                groups = policy.annotate(groups, cfg.train.micro_batch_tokens) if needs_old_log_probs(cfg) else groups
            buffer.extend(groups)
            with run.phase("train"):
                for batch in run.batches(buffer.batches(cfg.train.epochs)):
                    for tokens in scored_micro_batches(policy, batch, **micro_batching(cfg)):
                        losses = loss(tokens)
                        torch.stack([losses[name] for name in LOSSES]).sum().backward()
                        run.count(tokens, losses)
                    run.take_step(optimizer)
            with run.phase("sync"):
                weights.push()  # answers under way go on with the new weights
                collector.advance()
            run.finish_step(buffer.drain())
        return run.finish(policy.model, tokenizer)


if __name__ == "__main__":
    grpo_async()
