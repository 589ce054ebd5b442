"""A run on one GPU of Modal's (1.6):
`modal run docs/cloud/modal_train.py --name first --overrides "+experiment=quickstart"`.

Runs are kept on the volume grpo-rl-runs: `modal volume get grpo-rl-runs NAME`.
"""

import shlex
import subprocess

import modal

image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("g++", "libnuma1")
    .add_local_dir(".", "/source", copy=True, ignore=[".git", ".venv", "outputs"])
    .run_commands("pip install '/source[vllm]'")
)
app, runs = modal.App("grpo-rl", image=image), modal.Volume.from_name("grpo-rl-runs", create_if_missing=True)


@app.function(gpu="H100", timeout=24 * 60 * 60, volumes={"/runs": runs})
def train(overrides: str = "+experiment=quickstart", name: str = "first") -> None:
    """One run, in a folder of that name, which it goes on in if it is there."""
    command = ["grpo-rl", "train", f"hydra.run.dir=/runs/{name}", "resume=auto"]
    subprocess.run([*command, *shlex.split(overrides)], check=True)
