"""GRPO, asynchronous (samples while it trains): `python sota/grpo_async.py env.path=train.jsonl train.max_staleness=2`.

Engines run in Ray actors, on this machine or on the cluster at `ray.address`, where the trainers are actors, too. The
algorithm is that of sota/grpo.py; what differs is that a push reaches engines in the middle of their responses, whose
tokens then come from several policy versions.
"""

from grpo_rl.settings.config import main
from grpo_rl.waits import start_phase


@main(config_name="grpo_gsm8k", mode="async")
def grpo_async(settings, folder):
    # Here, not above: a wrong setting is refused before the seconds that this takes.
    with start_phase("importing torch, Ray and the rest"):
        from grpo_rl.assembly.site import make_site

    with make_site(settings) as site:  # which devices do what, and where
        return site.run(train, settings, folder)


def train(settings, folder, site):
    """The run, in each of the processes that train."""
    from grpo_rl.assembly.asynchronous import async_run

    epochs, stop_kl = settings.train.epochs, settings.policy.stop_kl
    with async_run(settings, folder, site) as run:
        parts = run.parts
        policy, reference, loss, optimizer = parts.policy, parts.reference, parts.loss, parts.optimizer

        parts.collector.update_policy_weights_()
        run.evaluate_before()
        for groups in run.collections():  # sampling goes on meanwhile, as far as train.max_staleness allows
            with run.phase("score"):
                if reference:
                    groups = reference.add_log_probs(groups, run.max_tokens)
                if parts.needs_old_log_probs:
                    groups = policy.add_log_probs(groups, run.max_tokens)
            parts.buffer.extend(parts.compute_advantages(groups))
            with run.phase("train"):
                for batch in run.optimizer_steps(parts.buffer.batches(epochs)):
                    for micro_batch in run.micro_batches(batch):  # if memory runs out: again, with smaller ones
                        with micro_batch as tokens:
                            losses = loss(tokens)
                            losses["loss"].backward()
                            run.record.add(tokens, losses)
                    run.check_mismatch()  # tokens of older versions are compared separately
                    run.add_result(optimizer.step(run.record.loss_is_finite, run.locate_nonfinite))
                    if stop_kl is not None and run.record.kl_sampler > stop_kl:
                        break
            with run.phase("sync"):
                parts.collector.update_policy_weights_()  # responses in flight go on with them; new groups have room
            run.finish_step(parts.buffer.drain())
        return run.finish()


if __name__ == "__main__":
    grpo_async()
