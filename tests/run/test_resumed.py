"""Settings that a resumed run may change, and those that refuse a checkpoint."""

import pytest

from grpo_rl.run.resumed import check_config


def test_another_config_is_refused_with_the_keys_that_differ():
    saved = {"optimizer": {"lr": 1e-5}, "logger": {"mode": "online"}, "resume": None}
    current = {"optimizer": {"lr": 1e-4}, "logger": {"mode": "offline"}, "resume": "auto"}
    with pytest.raises(ValueError, match=r"optimizer\.lr: 1e-05 in the checkpoint, 0\.0001 here") as error:
        check_config(saved, current)
    assert "logger" not in str(error.value)
    check_config(saved, saved | {"resume": "auto"})
    with pytest.raises(ValueError, match=r"evaluate\.rows"):
        check_config({"evaluate": {"rows": 8}}, {"evaluate": {"rows": 9}})
    served = [{"ref_model": {"name": name}} for name in ("http://a:1/v1", "http://b:2/v1", "org/model")]
    check_config(*served[:2])
    with pytest.raises(ValueError, match=r"ref_model\.name"):
        check_config(*served[1:])


@pytest.mark.parametrize(
    "key",
    [
        "evaluate.frequency", "train_model.lora.export", "env.isolated", "ray.nodes", "mismatch.bound",
        "logger.settings.mlflow.tracking_uri", "train.micro_batch_tokens",
    ],
)  # fmt: skip
def test_a_resumed_run_may_change(key):
    check_config({}, {key: "one"})
