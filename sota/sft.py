r"""SFT (imitates the data's responses, as before GRPO): `python sota/sft.py env.path=train.jsonl optimizer.lr=1e-5`.

GRPO goes on from what it writes: `python sota/grpo.py model.name=RUN/model`. On two GPUs:

    torchrun --nproc-per-node 2 sota/sft.py train_model.parallel=fsdp train_model.num_devices=2
"""

from grpo_rl.settings.config import main
from grpo_rl.waits import start_phase


@main(config_name="sft", mode="sft")
def sft(settings, folder):
    # Here, not above: a wrong setting is refused before the seconds that these take.
    with start_phase("importing torch and the rest"):
        from grpo_rl.assembly.sft import sft_run

    with sft_run(settings, folder) as run:  # its folder, model and demonstrations
        parts = run.parts
        loss, optimizer = parts.loss, parts.optimizer

        run.evaluate_before()
        for groups in run.collections():  # the rows of each step, each as a group of one response
            with run.phase("train"):
                for batch in run.optimizer_steps([groups]):
                    for micro_batch in run.micro_batches(batch):  # if memory runs out: again, with smaller ones
                        with micro_batch as tokens:
                            losses = loss(tokens)
                            losses["loss"].backward()
                            run.record.add(tokens, losses)
                    run.record.complete()  # adds up what other ranks scored
                    run.add_result(optimizer.step(run.record.loss_is_finite, run.locate_nonfinite))
            run.finish_step(groups)
        return run.finish()


if __name__ == "__main__":
    sft()
