r"""GRPO, synchronous (sample, then train): `python sota/grpo.py env.path=train.jsonl optimizer.lr=1e-5`.

Two GPUs train and a third samples, with the transformers engine (with vLLM: sota/grpo_async.py):

    torchrun --nproc-per-node 2 sota/grpo.py train_model.parallel=fsdp train_model.num_devices=2 \
        inference_model.num_devices=1 inference_model.engine=transformers

Every rank runs this loop; only rank zero samples.
"""

from grpo_rl.settings.config import main
from grpo_rl.waits import start_phase


@main(config_name="grpo_gsm8k")
def grpo(settings, folder):
    # Here, not above: a wrong setting is refused before the seconds that these take.
    with start_phase("importing torch and the rest"):
        from grpo_rl.assembly.run import sync_run

    epochs, stop_kl = settings.train.epochs, settings.policy.stop_kl
    with sync_run(settings, folder) as run:  # its folder, model, engine and environment
        parts = run.parts
        policy, reference, loss, optimizer = parts.policy, parts.reference, parts.loss, parts.optimizer

        parts.collector.update_policy_weights_()  # verifies that the engine holds the weights that will be trained
        run.evaluate_before()
        for groups in run.collections():  # samples; each yields groups with rewards
            with run.phase("score"):
                if reference:  # only if there is a KL term
                    groups = reference.add_log_probs(groups, run.max_tokens)
                if parts.needs_old_log_probs:  # otherwise ratios are to the sampler's own log-probs
                    groups = policy.add_log_probs(groups, run.max_tokens)
            parts.buffer.extend(parts.compute_advantages(groups))
            with run.phase("train"):
                for batch in run.optimizer_steps(parts.buffer.batches(epochs)):  # the groups for each step in turn
                    for micro_batch in run.micro_batches(batch):  # if memory runs out: again, with smaller ones
                        with micro_batch as tokens:
                            losses = loss(tokens)
                            losses["loss"].backward()
                            run.record.add(tokens, losses)
                    run.check_mismatch()  # sampler against trainer: a fault stops the run
                    run.add_result(optimizer.step(run.record.loss_is_finite, run.locate_nonfinite))
                    if stop_kl is not None and run.record.kl_sampler > stop_kl:
                        break  # KL to the sampling policy is too large: stop reusing this collection
            with run.phase("sync"):
                parts.collector.update_policy_weights_()
            run.finish_step(parts.buffer.drain())
        return run.finish()


if __name__ == "__main__":
    grpo()
