"""sota/sft.py on CPU with a tiny model: what it learns and writes, how it resumes, what it refuses."""

import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_runs import run_script
from transformers import AutoModelForCausalLM

from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.report import charts, headline
from grpo_rl.training.checkpoint import checkpoints, load
from tests.run.test_run import comparable, masters

SOTA = Path(__file__).parents[2] / "sota"
run = functools.partial(run_script, SOTA / "sft.py")
pytestmark = pytest.mark.usefixtures("own_cache")
OF_GRPO = ("env.num_envs", "env.repeats", "train.total_dialog_turns", "inference_model.engine")


@pytest.fixture(scope="module")
def tiny(tiny_run):
    """Five steps of four of six rows: three epochs, of which the last step has the two rows that are left."""
    own = ["train.optim_batch_size=4", "train.epochs=3", "evaluate.rows=4", "sampling.max_new_tokens=10"]
    return [*(word for word in tiny_run if not word.startswith(OF_GRPO)), *own]


@pytest.fixture(scope="module")
def finished(tiny, tmp_path_factory):
    return run(tiny, tmp_path_factory.mktemp("sft") / "run")


def test_the_loss_falls_and_a_run_leaves_all_its_files(finished):
    rows, summary = read_metrics(finished), json.loads((finished / "summary.json").read_text())
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4, 5, 5]
    assert [row["train/epoch"] for row in rows[1:-1]] == pytest.approx([4 / 6, 8 / 6, 12 / 6, 16 / 6, 18 / 6])
    first, last = rows[0]["eval/loss"], rows[-1]["eval/loss"]
    assert last < first - 0.5
    assert (summary["eval_loss_before"], summary["eval_loss_after"], summary["finished"]) == (first, last, True)
    # Each response is "so", a line break, "####", a blank, a digit and the end of turn: ten bytes in all.
    assert [row["train/tokens"] for row in rows[1:-1]] == [40, 40, 40, 40, 20]
    assert {"loss/sft", "loss/total", "grad_norm", "lr", "entropy", "memory/peak_gib"} < rows[1].keys()
    assert not [name for row in rows for name in row if name.startswith(("reward", "kl", "mismatch"))]
    totals = [[row[f"total/{name}"] for name in ("responses", "trained_tokens")] for row in rows[1:-1]]
    assert totals == [[4, 40], [8, 80], [12, 120], [16, 160], [18, 180]]
    assert all(0 < row["time/read_s"] < row["time/at_s"] for row in rows[1:-1])
    assert "total/sampled_tokens" not in rows[5]
    assert summary["task"] == "gsm8k" and "sft" in summary["command"]
    # Nothing was sampled: there are no responses, no tokens with two log-probs, and no engine's times.
    assert not [name for name in ("completions", "tokens", "sampling", "lineage") if list(finished.glob(f"{name}*"))]
    model = AutoModelForCausalLM.from_pretrained(finished / "model", dtype=torch.bfloat16)
    for name, master in masters(finished).items():
        assert torch.equal(model.get_parameter(name), master.bfloat16()), name


def test_page_log_docs_and_model_card_tell_of_imitation(finished):
    docs = (SOTA.parent / "docs" / "metrics.md").read_text()
    assert not [name for row in read_metrics(finished) for name in row if name != "step" and f"`{name}`" not in docs]
    before, after = (read_metrics(finished)[i]["eval/loss"] for i in (0, -1))
    head = headline.build(finished)
    said = f"The loss of held-out demonstrations went from {before:.3f} to {after:.3f}; in training it was"
    assert head["headline"].startswith(said) and "trained with SFT on gsm8k" in head["title"] and not head["note"]
    assert [tile["label"] for tile in head["tiles"]][:2] == ["Held-out loss", "Steps"]
    drawn = {chart["title"] for chart in charts.build(finished)["charts"]}
    assert {"SFT loss", "Epochs"} <= drawn and "Held-out reward" not in drawn
    assert not [chart for chart in charts.build(finished)["charts"] if chart["group"] == "Everything else"]
    assert "Step time" in drawn
    assert said in (finished / "report.html").read_text()
    log = (finished / "sft.log").read_text()
    assert f"held-out loss {before:.3f}" in log and "step 5/5 · loss " in log
    card = (finished / "model" / "README.md").read_text()
    assert ", trained with SFT on gsm8k" in card and "`train.epochs` | 3" in card and "Reward" not in card
    assert f"loss of held-out demonstrations {before:.3f} before and {after:.3f} after" in card


def test_a_resumed_run_goes_on_bit_for_bit_and_may_be_prolonged(tiny, finished, tmp_path, capsys):
    folder = run([*tiny, "train.epochs=2"], tmp_path / "run")
    assert comparable(folder)[:3] == comparable(finished)[:3]
    whole = masters(finished)
    run([*tiny, f"resume={folder}"], tmp_path / "unused")
    assert comparable(folder)[3:] != [] and all(torch.equal(whole[n], x) for n, x in masters(folder).items())
    steps = {row["step"]: row for row in comparable(finished) if "loss/total" in row}
    assert {row["step"]: row for row in comparable(folder) if "loss/total" in row} == steps
    run([*tiny, f"resume={folder}"], tmp_path / "unused")
    told = "is finished after 5 steps, and nothing is left to do; to go on, raise train.epochs above 3 (with"
    assert told in capsys.readouterr().out
    fourth = folder / "checkpoints" / "checkpoint_000004.pt"  # in the middle of an epoch
    run([*tiny, f"resume={fourth}"], tmp_path / "unused")
    assert {row["step"]: row for row in comparable(folder) if "loss/total" in row} == steps
    assert all(torch.equal(whole[n], x) for n, x in masters(folder).items())
    # No push follows, and the version that a checkpoint has stays as it was.
    assert {load(path)["version"] for path in checkpoints(folder / "checkpoints")} == {0}


@pytest.mark.nightly
def test_two_processes_take_the_steps_of_one(tiny, finished, tmp_path):
    words = ["train_model.parallel=ddp", "train.epochs=1", "train_model.timeout_s=120", f"hydra.run.dir={tmp_path}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    ended = subprocess.run([*torchrun, SOTA / "sft.py", *tiny, *words], capture_output=True, text=True, timeout=700)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = comparable(tmp_path)
    # The first epoch's steps of `finished` have the same rows, but for the last two of its second step.
    for name in ("loss/sft", "grad_norm", "train/tokens"):
        assert rows[1][name] == pytest.approx(comparable(finished)[1][name], rel=1e-2), name
    assert rows[0]["eval/loss"] == pytest.approx(comparable(finished)[0]["eval/loss"], rel=1e-2)
    assert [row["train/tokens"] for row in rows[1:-1]] == [40, 20] and rows[-1]["eval/loss"] < rows[0]["eval/loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")


@pytest.mark.nightly
def test_grpo_goes_on_from_the_model_it_writes_and_that_says_what_was_demonstrated(tiny, tiny_run, tmp_path):
    longer = ["train.epochs=30", "train.optim_batch_size=6", "train.checkpoint_frequency=0", "evaluate.rows=0"]
    warm = run([*tiny, *longer], tmp_path / "sft")
    words = [*tiny_run, "train.total_dialog_turns=16", "evaluate.rows=4", "sampling.max_new_tokens=12"]
    run_script(SOTA / "grpo.py", [*words, f"model.name={warm / 'model'}"], tmp_path / "run")
    first, *_ = read_metrics(tmp_path / "run")
    # "so", a line break, "#### ", a digit, and the end, at which generation stops; a random model meets the limit.
    assert (first["eval/mean_length"], first["eval/truncated_fraction"]) == (10.0, 0.0)
    assert first["eval/reasoning_format"] == 0.5  # a digit


def test_a_data_set_of_prompts_needs_no_reward(tiny, tmp_path):
    data = tmp_path / "chats.jsonl"
    chats = [[{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in (("a", "b"), ("c", "d"))]
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    model = next(word for word in tiny if word.startswith("model.name="))
    words = ["env=prompt_response", "env.prompt_column=messages", f"env.path={data}", model, "train.epochs=2"]
    words += ["inference_model.max_model_len=64", "sampling.max_new_tokens=8"]
    rows = read_metrics(run(words, tmp_path / "run"))
    assert [row["train/tokens"] for row in rows] == [8]  # two epochs of two rows, a letter and the end each
