"""GRPO, sample and train in turns: `python sota/grpo.py env.path=train.jsonl optimizer.lr=1e-5`.

Several devices train together under `torchrun --nproc-per-node 2 sota/grpo.py train_model.parallel=fsdp ...`: rank 0
samples and writes, and every rank runs all of this.
"""

import torch
from hydra.core.hydra_config import HydraConfig

from grpo_rl.build import parts as build
from grpo_rl.losses.grpo import LOSSES
from grpo_rl.policies.hub import resolve_model
from grpo_rl.policies.policy import scored_micro_batches
from grpo_rl.run.run import Run
from grpo_rl.settings.config import main
from grpo_rl.settings.derived import micro_batching, needs_old_log_probs
from grpo_rl.weights.push import WeightSync


@main(config_name="grpo_gsm8k")
def grpo(cfg):
    model_folder = resolve_model(cfg.model.name)
    devices = build.plan_devices(cfg, model_folder)  # which trains, which scores the reference, which samples
    tokenizer = build.make_tokenizer(model_folder, cfg.model.chat_template)
    env = build.make_env(cfg, tokenizer)  # prompts in, rewards out
    loss, buffer = build.make_loss(cfg), build.make_buffer(cfg, env.task.reward_parts)
    held_out = build.eval_rows(cfg, env)

    ranks = build.make_ranks(cfg, devices)  # the processes that train together; None where this one is alone
    with Run(cfg, env, HydraConfig.get().runtime.output_dir, held_out, build.model_bytes(model_folder), ranks) as run:
        policy = build.make_policy(cfg, model_folder, devices, ranks)
        reference = build.make_reference(cfg, model_folder, devices, policy)  # None at kl_coef=0
        optimizer = run.own(build.make_optimizer(cfg, policy, ranks))
        run.measure_limit(policy.model, devices)  # a second, once per machine
        engine = run.own(build.make_engine(cfg, model_folder, devices, ranks))
        weights = WeightSync(policy.model, engine, ranks=ranks)

        schedules = build.make_schedules(cfg, loss, buffer, reference, policy)  # KL weight, group size, reference
        run.attach(policy, optimizer, weights, engine, schedules)  # a resumed run goes back to its checkpoint here
        weights.push()  # the engine now holds, provably, what will be trained
        run.evaluate_before()
        collector = build.make_collector(cfg, env, engine, run.collected, run.led)
        for groups in run.steps(collector):
            with run.phase("score"):
                groups = reference.annotate(groups, cfg.train.micro_batch_tokens) if reference else groups
                groups = policy.annotate(groups, cfg.train.micro_batch_tokens) if needs_old_log_probs(cfg) else groups
            buffer.extend(groups)  # rewards of a group become advantages
            with run.phase("train"):
                for batch in run.batches(buffer.batches(cfg.train.epochs)):
                    for tokens in scored_micro_batches(policy, batch, **micro_batching(cfg)):
                        losses = loss(tokens)
                        torch.stack([losses[name] for name in LOSSES]).sum().backward()
                        run.count(tokens, losses)
                    run.take_step(optimizer)  # unless something is wrong with it
            with run.phase("sync"):
                weights.push()
            run.finish_step(buffer.drain())
        return run.finish(policy.model, tokenizer)


if __name__ == "__main__":
    grpo()
