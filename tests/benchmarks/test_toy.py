"""Every script of benchmarks/ runs, with all of its arms, at sizes of seconds; the figures mean nothing."""

import json
import logging
import multiprocessing
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nightly

SCRIPTS = sorted(path.stem for path in (Path(__file__).resolve().parents[2] / "benchmarks").glob("*.py"))
NO_FIGURES = {"run_all", "render"}
"""Programs that run the others, or show what they found; they have tests of their own."""
STEADY = "import time\nwhile True: time.sleep(0.02)"
TRL = "--data {data}/gsm8k/train.jsonl --model {model} --prompts 2 --repeats 2 --response 8 --trl-batch 2 4"
TOYS = {
    "bit_identical": "--before HEAD --only sync async --keep {folder}",
    "buffer": "--groups 4",
    "checkpoint_stall": "--tiny",
    "collector": "--data {data}/gsm8k/train.jsonl --model {model} --shapes 2x2x4 --max-model-len 512",
    "dialogs": "--model {model} --conversations 2 --response 4 --slower 2",
    "drafts": "--data {data}/gsm8k/train.jsonl --model {model} --live 1 2 --prompts 2 --tokens 8",
    "gpu": "--toy --out {folder}/gpu.json",
    "head": "--shape 64 32 128",
    "intervals": "--count 10 --compare",
    "learning": "--runs ours:0 trl:0 --show --folder {folder}/runs --target 0 --trl-batch 2 4 --settings "
    "model.name={model} env.num_envs=2 env.repeats=2 train.optim_batch_size=4 train.total_dialog_turns=12 "
    "sampling.max_new_tokens=4 evaluate.rows=4 train_model.compile=false",
    "memory": "--vocabs 64 128 --tokens 16 32 --vocab 64 --response 16",
    "operators": "--tokens 32",
    "prefix": "--model {model} --shape 8 4 2 --share-prompt 8 --share-response 4",
    "push": "--model {model}",
    "ragged": "--model {model} --prompts 2 --repeats 4 --prompt 4 --median 4 --longest 16 --trl-batch 4 8",
    "report": "--steps 4 --groups 2 --size 2",
    "rollouts": "--trajectories 8",
    "share": "--steps 4 --runs 1",
    "scoring": "--data {data} --responses 8",
    "soak": "--minutes 0.05 --every 0.1",
    "staleness": "--steps 4 --out {folder}/staleness.svg",
    "step_vs_before": TRL.partition(" --trl-batch")[0] + " --before HEAD",
    "step_vs_trl": TRL,
    "tools": "--conversations 16 --step-ms 0.5",
    "trees": "--model {model} --prompts 1 --group 2 --response 4 --hotpotqa {data}/hotpotqa/hotpotqa_train.json",
    "warm_start": "--tiny --steps 1",
}
FACTS = {f"City {i}": [f"City {i} has {i} bridges.", f"It lies by river {i}."] for i in range(8)}
DATA = {
    "gsm8k/train.jsonl": [{"question": f"What is {i} + 1?", "answer": f"So much.\n#### {i + 1}"} for i in range(8)],
    "ifeval/input_data.jsonl": [
        {"key": i, "prompt": "Say no.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
        for i in range(8)
    ],
    "ifeval/recorded_verdicts.jsonl": [{"response": f"{', '.join('no' * i)}."} for i in range(8)],
    "math500/math500.json": [{"problem": f"What is {i}/7?", "answer": rf"\frac{{{i}}}{{7}}"} for i in range(8)],
    "hotpotqa/hotpotqa_train_corpus.json": FACTS,
    "hotpotqa/hotpotqa_train.json": [
        {"question": f"{i} bridges?", "answer": title, "supporting_facts": [[title, 0]], "context": [[title, texts]]}
        for i, (title, texts) in enumerate(FACTS.items())
    ],
    "scitldr/scitldr_A_dev.jsonl": [{"source": [f"We show {i}.", "It is small."]} for i in range(8)],
}
"""Rows in the forms of the data that the benchmarks read."""


@pytest.fixture(scope="module")
def toys(script, default_model, tmp_path_factory):
    """The folders of a toy model with the default model's tokenizer, and of the data."""
    folder, data, cache = (tmp_path_factory.mktemp(name) for name in ("models", "data", "cache"))
    for name, rows in DATA.items():
        lines = map(json.dumps, rows if name.endswith(".jsonl") else [rows])
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text("".join(f"{line}\n" for line in lines))
    (cache / "models").symlink_to(default_model.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRPO_RL_CACHE", str(cache))  # rates measured beside other tests are none for the user's runs
        # Arms are forks of a process that has imported what takes seconds, and nothing of the project.
        multiprocessing.set_forkserver_preload(["torch", "torchrl.data", "transformers"])
        patch.setattr(script("harness"), "START", "forkserver")
        yield {"model": script("shapes").model_folder("toy", folder), "data": data}


def test_every_script_has_a_toy(script):
    assert {name for name in SCRIPTS if hasattr(script(name), "main")} == TOYS.keys() | NO_FIGURES


# Beside others a run may take longer than the rows of gpu may.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.alone if name == "gpu" else ()) for name in TOYS]
)
def test_a_script_runs_at_toy_size_with_all_its_arms(script, toys, name, tmp_path, monkeypatch):
    out, module = tmp_path / "out.json", script(name)
    words = TOYS[name].format(**toys, folder=tmp_path).split()
    words += [sys.executable, "-c", STEADY] if name == "soak" else []
    if has_figure := hasattr(module, "NAME") or name == "step_vs_before":
        steps = [] if name in ("learning", "memory") else ["--steps", "2" if name == "checkpoint_stall" else "1"]
        words += [*steps, "--force", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    assert not module.main()
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if type(h) is not logging.FileHandler]  # Hydra's, of a run that is gone
    if not has_figure:
        return
    found = json.loads(out.read_text())
    tried = found.get("tried_alone_s", {})
    assert not found.get("failed") and all(isinstance(seconds, float) for seconds in tried.values()), found
    assert f"commit {found['code']['commit']}" in script("render").render([found])["README.md"]
