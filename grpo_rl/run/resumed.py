"""The settings of a run that is resumed, compared with those it had before."""

from collections.abc import Mapping
from typing import Any

from grpo_rl.policies.before_loading import is_url
from grpo_rl.section import declared
from grpo_rl.settings.sections import Sections
from grpo_rl.storage.yaml_text import flat


def length_setting(config: Mapping[str, object]) -> str:
    """The setting for the length of a run, which also prolongs a finished one; of a config by dotted names.

    >>> length_setting({"mode": "sft"}), length_setting({"mode": "sync", "train.steps": 9}), length_setting({})
    ('train.epochs', 'train.steps', 'train.total_dialog_turns')
    """
    if config.get("mode") == "sft":
        return "train.epochs"
    return "train.steps" if config.get("train.steps") else "train.total_dialog_turns"


def check_config(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose saved config differs from this run's in a key that touches what is computed.

    Raises:
        ValueError: settings differ that a resumed run may not change; the message lists each.
    """
    before, now = flat(saved), flat(current)
    # A schedule that does not decay is the same however long the run: it may be prolonged.
    length = {length_setting(now), length_setting(before), "train.total_dialog_turns"}
    may_change = {key for key, setting in declared(Sections).items() if setting.may_change}
    may_change |= length if now.get("optimizer.schedule") == "constant" else set()
    teachers = [key for key in before if key == "ref_model.name" or key.endswith(".teacher")]
    may_change |= {key for key in teachers if is_url(str(before[key])) and is_url(str(now.get(key)))}  # a new address
    different = [
        f"{key}: {before.get(key, 'absent')} in the checkpoint, {now.get(key, 'absent')} here"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not any(key == k or key.startswith(k + ".") for k in may_change)
    ]
    if different:
        if before.get("train_model.dtype") not in (None, now.get("train_model.dtype")):  # null depends on the machine
            different.append(f"(set train_model.dtype={before['train_model.dtype']}, as when the run began)")
        raise ValueError("the checkpoint is of another config:\n  " + "\n  ".join(different))
