"""The model card: ``README.md`` of an exported model, with the front matter that the Hugging Face hub reads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, try_to_load_from_cache

from grpo_rl.envs.sources import HUB_PREFIX
from grpo_rl.monitor.progress import duration
from grpo_rl.policies.before_loading import is_hub_name, local_folder
from grpo_rl.run.origin import repository
from grpo_rl.run.push import CARD
from grpo_rl.settings.relations import is_read
from grpo_rl.storage.yaml_text import read_yaml

SHOWN = {
    "loss": ("surrogate", "ratio", "aggregate", "advantage", "kl"),
    "optimizer": ("name", "lr", "schedule"),
    "policy": ("kl_coef",),
    "train": ("total_dialog_turns", "optim_batch_size", "epochs", "seed"),
    "env": ("num_envs", "repeats"),
    "sampling": ("temperature", "top_p", "max_new_tokens"),
}
"""The settings that the card names; all of them are in the run folder's ``config.yaml``."""


def model_card(config: Mapping[str, Any], summary: Mapping[str, Any]) -> str:
    """The card of a finished run's model, from the run's config and the content of its ``summary.json``.

    Local paths and the settings of loggers, which may hold a key, stay out of it.
    """
    base, env = config["model"]["name"], config["env"]
    adapters = config["train_model"]["lora"]["rank"] and config["train_model"]["lora"]["export"] == "adapter"
    path, data = env.get("path"), repository(env)
    if path and not path.startswith(HUB_PREFIX) and not summary.get("data_revision"):
        data = None  # it may be a folder of the machine that trained
    found, sft = base_license(base), config["mode"] == "sft"
    head = ModelCardData(
        library_name="peft" if adapters else "transformers",
        pipeline_tag="text-generation",
        base_model=base if on_hub(base) else None,
        license=found,
        datasets=[data] if data else None,
        tags=[*(["sft", "grpo_rl"] if sft else ["grpo", "grpo_rl", "reinforcement-learning"]), env["dataset"]],
    )
    shown = [(part, key) for part, keys in SHOWN.items() for key in keys if not sft or is_read(f"{part}.{key}")]
    added = "".join(f", plus `{key}`" for key in env.get("rewards", {}))
    taught = "**Imitates**: responses in the data" if sft else f"**Reward**: of the task `{env['dataset']}`{added}"
    name = base if on_hub(base) else Path(base).name
    at = _at(summary, "model_revision") if on_hub(base) else ""
    read = f"{data}{_at(summary, 'data_revision')}" if data else "data of its own" if path else env["dataset"]
    lines = [
        f"# {name}, trained with {'SFT' if sft else 'GRPO'} on {env['dataset']}",
        "",
        f"- **Base model**: {name}{at}" + ("" if found else "; its licence is not known here, look it up"),
        f"- **Data**: {read}",
        f"- {taught}",
        f"- **Result**: {result(summary)}",
        f"- **Training**: {summary.get('steps')} steps in {duration(summary.get('seconds') or 0)}",
        "",
        "| setting | value |",
        "| --- | --- |",
        *(f"| `{part}.{key}` | {config[part][key]} |" for part, key in shown),
        "",
        "## Made by",
        "",
        f"grpo_rl {summary.get('grpo_rl')}"
        + (f", commit {summary['git_commit']}" if summary.get("git_commit") else "")
        + f", config {summary.get('config_hash')}; "
        + ", ".join(f"{key} {value}" for key, value in summary.get("versions", {}).items() if key != "grpo_rl"),
    ]
    return f"---\n{head.to_yaml()}\n---\n\n" + "\n".join(lines) + "\n"


def _at(summary: Mapping[str, Any], key: str) -> str:
    """The commit of the hub that was loaded, behind a name."""
    return f" at commit {commit}" if (commit := summary.get(key)) else ", whose commit is not known"


def result(summary: Mapping[str, Any]) -> str:
    """The gain in held-out reward with its interval, or what is known instead.

    >>> result({"eval_before": 0.25, "eval_after": 0.5, "eval_gain": 0.25, "eval_gain_ci95": [0.125, 0.375]})
    'held-out reward 0.250 before and 0.500 after, a gain of +0.250 (95 % interval +0.125 to +0.375)'
    >>> result({"train_reward_first": 0.25, "train_reward_last": 0.5})
    'training reward 0.250 at first and 0.500 at last (first and last steps); not measured on held-out data'
    """
    if summary.get("eval_gain_ci95"):
        low, high = summary["eval_gain_ci95"]
        return (
            f"held-out reward {summary['eval_before']:.3f} before and {summary['eval_after']:.3f} after, a gain of "
            f"{summary['eval_gain']:+.3f} (95 % interval {low:+.3f} to {high:+.3f})"
        )
    if summary.get("eval_loss_after") is not None:
        before, after = summary["eval_loss_before"], summary["eval_loss_after"]
        return f"loss of held-out demonstrations {before:.3f} before and {after:.3f} after, in nats a token"
    if summary.get("train_reward_first") is None:
        return "not measured"
    return (
        f"training reward {summary['train_reward_first']:.3f} at first and {summary['train_reward_last']:.3f} at last "
        "(first and last steps); not measured on held-out data"
    )


def on_hub(name: str) -> bool:
    """True if a model's name is one of the hub: ``organisation/model``, and no folder here."""
    return name.count("/") == 1 and is_hub_name(name) and local_folder(name) is None


def base_license(name: str) -> str | None:
    """The licence in the base model's own card, if that lies here."""
    try:
        path = try_to_load_from_cache(name, CARD) if on_hub(name) else Path(name) / CARD
        text = Path(path).read_text() if isinstance(path, str | Path) and Path(path).is_file() else ""
        head = read_yaml(text.split("---")[1]) if text.startswith("---") else {}
    except (OSError, ValueError, IndexError):  # a name may be no repository's, a card no text
        return None
    found = head.get("license") if isinstance(head, dict) else None
    return found if isinstance(found, str) else None
