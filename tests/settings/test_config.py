"""Config: unknown keys and wrong values are refused before anything starts; config/ says what code reads."""

import ast
import inspect
import pickle
import runpy
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from grpo_rl.diagnosis.mismatch import Mismatch
from grpo_rl.engines.base import Sampling
from grpo_rl.envs.base import LLMEnv
from grpo_rl.envs.rewards.registry import read_parts
from grpo_rl.envs.spec import task_spec
from grpo_rl.losses.factors import loss_section, shared_settings
from grpo_rl.policies.lora import LoRA
from grpo_rl.section import declared, plain
from grpo_rl.settings.compose import FOLDER, compose_config, with_loss
from grpo_rl.settings.schema import Settings
from grpo_rl.settings.sections import declarations
from grpo_rl.settings.tasks import TASKS, task_section
from grpo_rl.training.optimizer import PolicyOptimizer

ROOT = Path(__file__).resolve().parents[2]


def config(*overrides):
    return compose_config("grpo_gsm8k", overrides)


@pytest.mark.slow
@pytest.mark.parametrize("experiment", sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml")))
def test_every_experiment_passes_the_checks(experiment):
    cfg = config(f"+experiment={experiment}")
    Settings.read(cfg)
    read_parts(cfg.env.rewards)  # each by its name, with settings that it has


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("num_generations=8", r"did you mean env\.repeats\?"),
        ("zzz=1", r"--cfg job"),
        ("inference_model.max_model_len=256", "leaves no room"),
        ("inference_model.engine=vlm", "did you mean vllm"),
        ("evaluate.rows=4 evaluate.patience=2", "set evaluate.frequency"),
        ("sampling.stop=['']", "none of them empty"),
        ("sampling.ignore_eos=true loss=dapo", "every response meets the length limit"),
        ("optimizer.lr=inf", "optimizer.lr is inf; it should be a finite number"),
        ("optimizer.betas=[0.9,high]", r"optimizer.betas\[1\] is 'high'; it should be a valid number"),
        ("+loss.reward_weights.x=much", "loss.reward_weights.x is 'much'; it should be a valid number"),
        ("logger.name=20250101", "it should be a valid string, or null; quoted it is: logger.name=\"'20250101'\""),
        ("+env.rewards.length=abc", "env.rewards.length.weight='abc'; a weight is a finite number"),
        ("env=prompt_response", r"env\.reward must be set"),
        ("policy.target_kl=0.1", r"policy\.target_kl=0\.1 with policy\.kl_coef=0\.0; both must be more than 0"),
        ("loss=gspo loss.top_entropy_fraction=0.2", r"use loss\.ratio=sequence_token"),
        ("loss=clip_cov loss.ratio=sequence", r"use loss\.ratio=sequence_token"),
        ("loss.normalizer=512", r"loss\.aggregate=sequence_mean reads none"),
        ("train_model.lora.alpha=64", r"train_model\.lora\.alpha=64 without adapters"),
        ("optimizer.lr=${no.such.key}", "the config can't be read: Interpolation key 'no.such.key' not found"),
    ],
)
def test_a_wrong_override_is_refused_with_what_it_must_be(overrides, message):
    with pytest.raises(ValueError, match=message):
        Settings.read(config(*overrides.split()))


@pytest.mark.parametrize("dataset", sorted({*TASKS} - {"mixture"}))
def test_each_tasks_config_has_exactly_the_settings_that_its_environment_takes(dataset):
    """The values are the defaults too, so that a script and the command line do the same."""
    pytest.importorskip({"math": "math_verify"}.get(dataset, "torch"))
    spec = task_spec(dataset)
    of_task = inspect.signature(spec.task).parameters
    takes = of_task | inspect.signature(spec.load_rows).parameters
    own = {name for name, setting in of_task.items() if setting.kind is setting.KEYWORD_ONLY}
    cfg = OmegaConf.to_container(OmegaConf.load(FOLDER / "env" / f"{dataset}.yaml"))
    values = {name: value for name, value in cfg.items() if name != "dataset"}
    if not spec.takes_reward:
        values |= values.pop("reward", {})
    assert values.keys() == own | set(spec.row_settings)
    for key in values.keys() - {"puzzles", "taskset"} - ({"reward"} if spec.takes_reward else set()):
        default = takes[key].default
        assert values[key] == (list(default) if isinstance(default, tuple) else default), key


def test_the_config_files_are_as_the_settings_are_declared():
    for path, text in runpy.run_path(str(ROOT / "tools" / "config_files.py"))["files"]().items():
        assert path.read_text() == text, path
    loss = OmegaConf.to_container(OmegaConf.load(FOLDER / "loss" / "grpo.yaml"))
    assert loss == {name: plain(setting.default) for name, setting in declared(loss_section()).items()}


# Parts that take a whole section as keyword arguments.
WHOLE = {"sampling": Sampling, "optimizer": PolicyOptimizer, "train_model.lora": LoRA, "mismatch": Mismatch}


@pytest.mark.slow
def test_each_setting_is_read_by_code():
    """A key is read by its name as an attribute or a key in the code outside settings/, or as an argument of a part."""
    sources = [path for folder in ("grpo_rl", "sota") for path in (ROOT / folder).rglob("*.py")]
    names = set()
    for path in sources:
        if path.parent.name != "settings" or path.stem in ("derived", "relations", "devices"):
            for node in ast.walk(ast.parse(path.read_text())):
                names |= {node.attr} if isinstance(node, ast.Attribute) else set()
                names |= {str(node.value)} if isinstance(node, ast.Constant) else set()
    of_env = inspect.signature(LLMEnv.__init__).parameters
    of_parts = {f"{name}.{key}" for name, part in WHOLE.items() for key in inspect.signature(part).parameters}
    for key in declarations("gsm8k"):
        name = key.rpartition(".")[2]
        if key.startswith("env.") and key.removeprefix("env.").partition(".")[0] in task_section("gsm8k").model_fields:
            continue  # the environment's constructor takes it: tested above
        if key.startswith("loss.") and name in shared_settings():
            continue  # a function of the loss takes it
        assert name in names or key in of_parts or (key.startswith("env.") and name in of_env), key


@pytest.mark.slow
def test_a_text_that_looks_like_an_interpolation_is_kept_and_written_as_it_is():
    settings = Settings.read(config()).with_values({"model.chat_template": r"$\{ and ${ and {{ x }}"})
    assert Settings.restored(settings.stored()) == settings == pickle.loads(pickle.dumps(settings))
    assert yaml.safe_load(settings.as_text())["model"]["chat_template"] == r"$\{ and ${ and {{ x }}"
    assert with_loss(settings, ["loss=dapo"]).model.chat_template == settings.model.chat_template


def test_a_distillation_is_replayed_with_another_weight():
    run = Settings.read(config("loss=distill", "policy.kl_coef=1", "ref_model.name=teacher"))
    again = with_loss(run, ["policy.kl_coef=0.5"])
    assert again.policy.kl_coef == 0.5 and again.ref_model.name == "teacher" and again.loss == run.loss


@pytest.mark.slow
def test_configs_that_differ_in_what_is_masked_are_written_differently():
    def written(**changes):
        settings = Settings.read(config()).with_values({"logger.settings": {"x": {"api_key": "abc"}}} | changes)
        return yaml.safe_load(settings.as_text())

    one, other = (written(**{"env.columns": {"answer_key": column}})["env"]["columns"] for column in ("gold", "best"))
    assert one != other and one["answer_key"].startswith("***") and len(one["answer_key"]) == 6
    assert written()["logger"]["settings"]["x"]["api_key"] == "***"  # as a run may be resumed with another
