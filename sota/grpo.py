"""GRPO, sample and train in turns: `python sota/grpo.py env.path=train.jsonl optimizer.lr=1e-5`.

Several devices train together under `torchrun --nproc-per-node 2 sota/grpo.py train_model.parallel=fsdp ...`: rank zero
samples and writes, and every rank runs all of this.
"""

from hydra.core.hydra_config import HydraConfig

from grpo_rl.build.run import sync_run
from grpo_rl.settings.config import main
from grpo_rl.training.micro_batches import scored_micro_batches


@main(config_name="grpo_gsm8k")
def grpo(settings):
    max_tokens, epochs, stop_kl = settings.train.micro_batch_tokens, settings.train.epochs, settings.policy.stop_kl
    with sync_run(settings, HydraConfig.get().runtime.output_dir) as run:  # its folder, model, engine and environment
        parts = run.parts
        policy, reference, loss, optimizer = parts.policy, parts.reference, parts.loss, parts.optimizer

        parts.weights.push()  # the engine now holds, provably, what will be trained
        run.evaluate_before()
        for groups in run.collections():  # a group of responses to each prompt, with their rewards
            with run.phase("score"):
                if reference:  # only if there is a KL term
                    groups = reference.add_log_probs(groups, max_tokens)
                if parts.needs_old_log_probs:
                    groups = policy.add_log_probs(groups, max_tokens)
            parts.buffer.extend(parts.compute_advantages(groups))
            with run.phase("train"):
                for batch in run.optimizer_steps(parts.buffer.batches(epochs)):
                    for tokens in scored_micro_batches(policy, batch, parts.micro_batching):
                        losses = loss(tokens)
                        losses["loss"].backward()
                        run.record.add(tokens, losses)
                    run.check_mismatch()  # sampler against trainer: a fault stops the run
                    run.count(optimizer.step(run.record.loss_is_finite, run.locate_nonfinite))
                    if stop_kl is not None and run.record.kl_sampler > stop_kl:
                        break  # too far from the policy that sampled
            with run.phase("sync"):
                parts.weights.push()
            run.finish_step(parts.buffer.drain())
        return run.finish()


if __name__ == "__main__":
    grpo()
