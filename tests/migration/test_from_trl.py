"""grpo-rl from-trl: six published configs train the same way here, and each field of TRL has a line."""

import dataclasses
import functools
import math
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from grpo_rl.cli import main
from grpo_rl.migration.command import read_trl
from grpo_rl.migration.from_trl import convert
from grpo_rl.migration.trl_fields import CONVERTED, DEFAULTS, RENAMED, UNNEEDED
from grpo_rl.section import select
from grpo_rl.settings.compose import FOLDER
from grpo_rl.settings.devices import allocate
from grpo_rl.settings.schema import SAME, Settings
from grpo_rl.training.optimizer import lr_factor

ROOT = Path(__file__).parents[2]

PUBLISHED = Path(__file__).parent / "published"
MORE = {
    "open_r1_math_1_5b.yaml": ["--rewards", "accuracy,format,tag_count", "--rows", "70000"],
    "open_r1_code_1_5b.yaml": ["--processes", "7"],
    "open_r1_simple_rl_7b.yaml": ["--processes", "7", "--rows", "7500"],
    "open_r1_distill_7b.yaml": ["--processes", "8", "--rows", "10000"],
    "open_r1_codeforces_7b.yaml": ["--processes", "8", "--rows", "8000"],
    "length_of_20.py.txt": ["--rewards", "grpo_rl.envs.rewards.examples:reward_len"],
}
"""Overrides that a person adds to each, for what the file itself doesn't say. (.txt: pytest would import it.)"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """A folder with our configs and the converted ones beside them."""
    folder = tmp_path_factory.mktemp("converted") / "config"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    for name, more in MORE.items():
        theirs = shutil.copy(PUBLISHED / name, folder.parent / name.removesuffix(".txt"))
        assert main(["from-trl", str(theirs), "--output", str(folder / converted(name)), *more]) == 0
    return folder


def converted(name) -> str:
    return f"{name.partition('.')[0]}.yaml"


def settings_of(configs, name) -> Settings:
    """The settings that the command printed at the conversion would read, their devices allocated, too."""
    with initialize_config_dir(str(configs), version_base="1.3"):
        cfg = compose(Path(converted(name)).stem)
    mode = "async" if "max_staleness" in (configs / converted(name)).read_text() else "sync"
    OmegaConf.update(cfg, "mode", mode)
    settings = Settings.read(cfg)
    allocate(settings, mode, visible=8, num_attention_heads=28)
    return settings


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_a_published_config_becomes_settings_without_an_error(configs, name):
    settings = settings_of(configs, name)
    assert settings.model.name == read_trl(configs.parent / name.removesuffix(".txt"))[0]["model_name_or_path"]


def test_published_configs_keep_their_batches_data_and_trls_defaults(configs):
    # 16 per device x 7 processes x 16 accumulated = 1792 responses a step, 256 prompts of 7 responses.
    settings = settings_of(configs, "open_r1_math_1_5b")
    assert (settings.train.optim_batch_size, settings.env.num_envs, settings.env.repeats) == (1792, 256, 7)
    # One epoch of 70,000 prompts: 490,000 responses, 273 whole steps; a tenth of them, rounded up, warm up.
    assert (settings.train.total_dialog_turns, settings.optimizer.warmup_steps) == (490_000, 28)
    # Of the seven processes' devices three train and four sample, in turns, as TRL's do.
    assert (settings.train_model.num_devices, settings.inference_model.num_devices) == (3, 4)
    assert (settings.train.max_staleness, settings.evaluate.frequency) == (0, 100)
    assert (settings.env.subset, settings.env.split, settings.env.eval_split) == ("all", None, "test")
    assert list(settings.logger.backend) == ["wandb"]
    settings = settings_of(configs, "length_of_20")
    assert (settings.optimizer.lr, settings.optimizer.schedule, settings.train.seed) == (1e-6, "linear", 42)
    assert (settings.loss.aggregate, settings.loss.clip_high) == ("token_mean", 0.2)
    assert (settings.loss.correction, settings.loss.correction_level) == ("mask", "sequence")
    assert (settings.loss.correction_low, settings.loss.correction_high) == (0.0, 3.0)
    assert settings.train_model.gradient_checkpointing and settings.sampling.max_new_tokens == 1024
    assert settings.train.total_dialog_turns == 2 * 4  # 2 steps of 4 responses


@pytest.mark.slow
def test_published_configs_keep_their_rewards_with_weights_and_dr_grpo_its_loss(configs):
    simple = settings_of(configs, "open_r1_simple_rl_7b")
    assert simple.env.dataset == "math" and simple.env.rewards == {"format": 0.5}
    assert simple.env.task["reward"]["correctness"] == 1.0
    length = settings_of(configs, "open_r1_distill_7b").env.rewards["soft_overlong_punishment"]
    assert length == {"weight": 1.0, "max_len": 32768, "cache": 4196}
    code = settings_of(configs, "open_r1_codeforces_7b")
    assert code.env.dataset == "prompt_response" and code.env.rewards == {"code_format": 0.1}
    assert (code.loss.aggregate, code.loss.advantage) == ("constant", "no_std")
    assert code.loss["normalizer"] is None  # max_new_tokens, which is TRL's max_completion_length
    assert code.loss.mask_truncated and code.optimizer.clip_grad_norm == 0.2
    assert code.env.task["prompt_column"] == "prompt_c++17"


def test_what_has_no_counterpart_is_the_files_first_comment(configs):
    text = (configs / "open_r1_codeforces_7b.yaml").read_text()
    for line in ("reward_funcs='cf_code': not here", "push_to_hub=True: not", "callbacks=['push_to_hub_rev"):
        assert f"#   {line}" in text
    assert "attn_implementation" not in text  # needs no counterpart


CONVERTED_VALUES = [
    ({"loss_type": "cispo", "epsilon_high": 5.0}, "loss.clip_high", 4.0),  # the cap itself in TRL
    ({"loss_type": "luspo"}, "loss.normalizer", 1.0),  # the sum over a response, then the mean over responses
    ({"loss_type": "sapo"}, "loss.aggregate", "sequence_mean"),
    ({"scale_rewards": True}, "loss.advantage", "zscore"),
    ({"scale_rewards": "batch"}, "loss.advantage", "batch_std"),
    ({"use_bias_correction_kl": False}, "loss.kl", "k3"),
    ({"warmup_ratio": 0.1, "warmup_steps": 0, "max_steps": 200}, "optimizer.warmup_steps", 20),
    # TrainingArguments.get_warmup_steps: ceil(0.1 x 11) = 2, where 1.1 is rounded to 1.
    ({"warmup_steps": 0.1, "max_steps": 11}, "optimizer.warmup_steps", 2),
    ({"max_steps": 6, "num_iterations": 2}, "train.total_dialog_turns", 24),  # 3 collections of 8
    ({"steps_per_generation": 4}, "env.num_envs", 4),  # 8 x 4 responses, groups of 8
    # 8 per device x 4 accumulated = 32 responses a step, 10 steps; TRL samples 8 at a time.
    ({"steps_per_generation": 1, "gradient_accumulation_steps": 4}, "env.num_envs", 4),
    ({"report_to": ["tensorboard", "comet_ml"]}, "logger.backend", ["tensorboard"]),
    ({"dataset_train_split": "train_prefs"}, "env.split", "train_prefs"),
    ({"dataset_name": "train"}, "env.path", "train"),
    ({"save_steps": 0.5, "max_steps": 10}, "train.checkpoint_frequency", 5),
    ({"eval_strategy": "steps", "eval_steps": 0.1, "max_steps": 50}, "evaluate.frequency", 5),
    ({"use_peft": True}, "train_model.lora.alpha", 32),
    ({"use_peft": True, "use_rslora": True}, "train_model.lora.rslora", True),
    ({"off_policy_mask_threshold": 0.5}, "loss.off_policy_bound", 0.5),
    ({"chat_template_kwargs": '{"enable_thinking": false}'}, "model.chat_template_kwargs.enable_thinking", False),
    ({"bf16": False}, "train_model.dtype", "float32"),
    ({"model_init_kwargs": {"dtype": "torch.bfloat16"}, "bf16": False}, "train_model.dtype", "bfloat16"),
    ({"lr_scheduler_kwargs": {"min_lr": 1e-7}, "learning_rate": 1e-6}, "optimizer.min_lr_fraction", 0.1),
    ({"max_grad_norm": 0}, "optimizer.clip_grad_norm", 1e9),
    ({"top_k": -1}, "sampling.top_k", 0),
    ({"reward_funcs": ["accuracy"], "dataset_prompt_column": "q"}, "env.columns", {"problem": "q"}),
    ({"vllm_mode": "server", "use_vllm": True, "vllm_tensor_parallel_size": 2}, "inference_model.num_devices", 2),
]


@pytest.mark.parametrize(("fields", "key", "value"), CONVERTED_VALUES)
def test_a_field_becomes_the_setting_of_the_same_effect(fields, key, value):
    found = select(convert(fields).config, key)
    assert found == (pytest.approx(value) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss_type": "vespo"}, "loss_type is 'vespo'"),
        ({"system_prompt": "${oc.env:HOME}"}, "which Hydra would resolve"),
        ({"num_generations": 7}, "groups of 7; .* --processes N"),
        ({"fp16": True}, "fp16"),
        ({"reward_weights": ["a"]}, "reward_weights"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"max_steps": math.nan}, "max_steps is nan"),
        ({"lr_scheduler_kwargs": {"min_lr": [1]}}, r"^lr_scheduler_kwargs.min_lr=\[1\]"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_remedy(fields, message):
    with pytest.raises(ValueError, match=message):
        convert(fields).as_yaml("theirs.yaml")


def test_a_value_that_is_nested_too_deep_is_refused(request):
    request.addfinalizer(functools.partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # torch's compiler raises it
    with pytest.raises(ValueError, match="recursion"):
        convert({"run_name": functools.reduce(lambda inner, _: [inner], range(600), "x")}).as_yaml("theirs.yaml")


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        # Expected by TRL 1.16: _compute_loss of trl/trainer/grpo_trainer.py, schedules of transformers/optimization.py.
        ({"loss_type": "bnpo", "gradient_accumulation_steps": 4}, "loss_type='bnpo': TRL's mean is over each of 4"),
        ({"loss_type": "bnpo", "num_processes": 2}, "loss_type='bnpo': TRL's mean is over each of 2 passes"),
        ({"loss_type": "bnpo"}, None),
        ({"steps_per_generation": 4}, "loss_type='dapo': TRL divides by 0.25 of the tokens of all 32 responses"),
        ({"steps_per_generation": 2, "gradient_accumulation_steps": 2}, None),
        ({"steps_per_generation": 1, "gradient_accumulation_steps": 4, "loss_type": "grpo"}, "steps_per_generation=1"),
        ({"loss_type": "grpo", "steps_per_generation": 4}, None),
        ({"entropy_coef": 0.01, "loss_type": "dr_grpo"}, "entropy_coef=0.01: TRL's bonus is the mean over the"),
        ({"entropy_coef": 0.01, "gradient_accumulation_steps": 2}, "entropy_coef=0.01: TRL's bonus"),
        ({"entropy_coef": 0.01}, None),
        ({"warmup_steps": 0.1, "max_steps": 20}, "warmup_steps=0.1: TRL's warm-up begins at a learning rate of 0"),
        ({"use_peft": True}, "lora_target_modules=None: peft's own choice by the type of model"),
        ({"use_peft": True, "lora_target_modules": ["q_proj"], "lora_task_type": "CAUSAL_LM"}, None),
        ({"dtype": "auto"}, "dtype='auto': bfloat16 is used"),
        ({"model_init_kwargs": {"revision": "abc", "torch_dtype": None}}, "model_init_kwargs={'revision': 'abc'}"),
        ({"dataset_configs": ["a", "b"], "dataset_config": "c"}, "dataset_configs=['a', 'b']: one subset is read, c"),
        ({"tf32": False}, None),
        ({"vllm_importance_sampling_corection": False}, "vllm_importance_sampling_corection=False: not taken over"),
        ({"num_generation": 4}, "num_generation=4: not taken over, see docs/from_trl.md; did you mean num_gener"),
        ({"report_to": ["tensorboard", "comet_ml"]}, "report_to='comet_ml'"),
        ({"a\x1b[31mX\ny\ud800": 1}, "aX y=1: not taken over"),
        ({"hub_token": "hf_abc"}, "hub_token=***: not taken over"),
    ],
)
def test_a_field_of_another_effect_than_in_trl_is_named_and_one_of_the_same_is_not(fields, line):
    made = convert({"max_steps": 20, "reward_funcs": ["format"]} | fields)
    said = [text for text in made.differences if not text.startswith("num_processes")]
    assert [text[: len(line or "")] for text in said] == ([line] if line else [])


def test_each_argument_of_the_model_is_named_by_itself():
    given = {"trust_remote_code": True, "device_map": "auto", "quantization_config": {"load_in_4bit": True}}
    said = convert({"model_init_kwargs": given}).differences
    assert sum(line.startswith("model_init_kwargs={'" + name) for name in given for line in said) == len(given)


@pytest.mark.slow
def test_warm_up_is_a_step_ahead_of_trls_and_as_long():
    transformers = pytest.importorskip("transformers")
    weight = torch.nn.Parameter(torch.zeros(()))
    theirs = transformers.get_scheduler("linear", torch.optim.SGD([weight], lr=1.0), 3, 10).lr_lambdas[0]
    ours = [lr_factor(step, 3, 10, "linear") for step in range(10)]
    assert ours[:2] == pytest.approx([theirs(1), theirs(2)])
    assert ours[3:] == pytest.approx([theirs(n) for n in range(3, 10)])


def test_a_scripts_line_breaks_stay_in_the_comment(tmp_path):
    """A line break, as in an f-string of several lines or in the script's own name, would end the comment."""
    script = tmp_path / "a\nenv: {reward: evil:run}\n#.py"
    script.write_text("GRPOConfig(run_name=f\"\"\"{'''\nenv:\n  reward: evil:run\n'''}\"\"\")\n")
    assert main(["from-trl", str(script), "--output", str(tmp_path / "x.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "x.yaml").read_text())["env"]["reward"] == "???"


def test_functions_that_a_config_names_are_given_again_on_the_command_line(tmp_path):
    """A converted config is run by who converts it: a stranger's file must not choose what is imported."""
    fields = {"reward_funcs": ["evil:run", "evil.run", "format"], "max_steps": 1}
    made = convert(fields)
    assert made.config["env"] == {"num_envs": 1, "repeats": 8, "rewards": {"format": 1.0}, "reward": None}
    assert "reward_funcs='evil:run': not here; give a function of yours, --rewards module:function" in made.differences
    assert convert(fields, rewards=["mine.run"]).config["env"]["reward"] == {"mine:run": 1.0}


def test_text_of_digits_stays_text_and_numbers_without_a_point_are_numbers(tmp_path):
    text = 'run_name: "20250101"\nlearning_rate: 1e-6\nlr_scheduler_type: cosine\nlr_scheduler_kwargs: {min_lr: 1e-7}\n'
    (tmp_path / "a.yaml").write_text(text)
    config = convert(read_trl(tmp_path / "a.yaml")[0]).config
    assert config["logger"]["name"] == "20250101"
    assert config["optimizer"]["lr"] == 1e-6 and config["optimizer"]["min_lr_fraction"] == pytest.approx(0.1)


def test_adapters_of_a_script_have_pefts_defaults(tmp_path):
    lora = pytest.importorskip("peft").LoraConfig(target_modules="all-linear")
    (tmp_path / "train.py").write_text(
        "GRPOConfig()\nLoraConfig(target_modules='all-linear', use_dora=True, bias='all')\n"
    )
    fields, unknown = read_trl(tmp_path / "train.py")
    made = convert(fields).config["train_model"]["lora"]
    theirs = {"rank": lora.r, "alpha": lora.lora_alpha, "dropout": lora.lora_dropout, "targets": "all-linear"}
    assert made == theirs | {"dora": True}
    assert unknown == ["LoraConfig(bias='all'): not taken over"]


def test_a_script_is_never_run(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nos.mkdir('ran')\nGRPOTrainer('org/model', args=GRPOConfig(learning_rate=LR, beta=0.1))\n"
        'rows = load_dataset("openai/gsm8k", "main", split="train[:500]", trust=x)\n'
    )
    fields, unknown = read_trl(script)
    data = {"dataset_name": "openai/gsm8k", "dataset_config": "main", "dataset_train_split": "train[:500]"}
    assert fields == {"beta": 0.1} | data
    assert sorted(line.partition(":")[0] for line in unknown) == [
        "GRPOTrainer('org/model', ...)", "learning_rate=LR", "load_dataset(trust=x)"
    ]  # fmt: skip
    assert not (tmp_path / "ran").exists() and not Path("ran").exists()


def test_a_script_with_its_own_rows_and_rewards_says_what_is_to_be_given_again(tmp_path, capsys):
    script = tmp_path / "sums.py"
    script.write_text(
        "MODEL = 'org/model'\nrows = Dataset.from_list([])\ndef right(completions, **_): ...\ndef short(**_): ...\n"
        "args = GRPOConfig(max_steps=2, reward_weights=[1.0, 0.2])\n"
        "GRPOTrainer(model=MODEL, reward_funcs=[right, short], args=args, train_dataset=rows, callbacks=[Mine()])\n"
    )
    words = ["from-trl", str(script), "--output", str(tmp_path / "x.yaml")]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "--rewards sums:right,sums:short; their module" in said and "none is known" not in said
    assert "GRPOTrainer(callbacks=[Mine()]): not taken over" in said
    assert said.endswith("--config-name x env.path=FILE\n")
    assert main([*words, "--rewards", "sums:right"]) == 2
    assert (
        "reward_weights has 2 values, and rewards are sums:right; give as many in --rewards" in capsys.readouterr().err
    )
    assert main([*words, "--rewards", "sums:right,sums:short"]) == 0  # over the file that it wrote before
    made = yaml.safe_load((tmp_path / "x.yaml").read_text())
    assert made["env"]["reward"] == {"sums:right": 1.0, "sums:short": 0.2} and made["model"]["name"] == "org/model"
    with (tmp_path / "x.yaml").open("a") as file:
        file.write("# mine\n")
    assert main([*words, "--rewards", "sums:right,sums:short"]) == 2


def test_a_name_with_several_values_is_no_literal(tmp_path):
    (tmp_path / "a.py").write_text(
        "lr = 1e-5\nbeta: float = 0.1\ndef main(lr): GRPOConfig(learning_rate=lr, beta=beta)\n"
    )
    assert read_trl(tmp_path / "a.py") == ({"beta": 0.1}, ["learning_rate=lr: no literal; left out"])


def test_a_file_that_is_no_config_is_named(tmp_path):
    for name, text, message in (
        ("a.yaml", "a: [", r"a\.yaml can't be read"),
        ("a.py", "x = (", r"a\.py can't be read"),
        ("a.py", "x = 1", "no call of GRPOConfig"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=message):
            read_trl(tmp_path / name)


def test_the_next_command_is_printed_and_an_output_that_exists_is_kept(tmp_path, capsys):
    words = ["from-trl", str(PUBLISHED / "open_r1_distill_7b.yaml"), "--processes", "8"]
    words += ["--output", str(tmp_path / "x.yaml")]
    assert main(words) == 0
    assert "Next: torchrun --nproc-per-node 4 -m grpo_rl.sota.grpo_async --config-dir" in capsys.readouterr().out
    (tmp_path / "x.yaml").write_text("mine")
    assert main(words) == 2
    assert "exists; give another --output" in capsys.readouterr().err
    assert (tmp_path / "x.yaml").read_text() == "mine"


def tables_of_the_page() -> dict[str, dict[str, tuple[str, str]]]:
    """The tables of docs/from_trl.md by their headings: TRL's default of each field, and what becomes of it."""
    found = {}
    for section in (ROOT / "docs" / "from_trl.md").read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*) \|$", section, re.MULTILINE)
        found[section.partition("\n")[0]] = {name: (default.strip("` "), text) for name, default, text in rows}
    return found


def test_the_page_of_the_docs_has_the_fields_that_are_converted():
    same, converted, unneeded, missing, renamed = tables_of_the_page().values()
    assert {name: text.strip("`") for name, (_, text) in same.items()} == SAME
    elsewhere = {"max_completion_len", "soft_punish_cache", "dataset_prompt_column"}  # Open-R1's
    elsewhere |= {"num_processes", "max_prompt_length", "logging_steps"}  # whose values are not needed by themselves
    assert converted.keys() | elsewhere == CONVERTED - SAME.keys()
    assert all(name.startswith(UNNEEDED) or name in CONVERTED for name in unneeded)
    assert not [name for name in missing if name.startswith(UNNEEDED) or name in CONVERTED]
    assert {name: text.strip("`") for name, (_, text) in renamed.items()} == RENAMED
    shown = {name: default for name, (default, _) in (same | converted).items() if default}
    assert shown == {name: str(default) for name, default in DEFAULTS.items()}


@pytest.mark.slow
def test_every_field_of_trl_is_in_exactly_one_table():
    trl = pytest.importorskip("trl")
    fields = {field.name: field for field in dataclasses.fields(trl.GRPOConfig)}
    fields |= {field.name: field for field in dataclasses.fields(trl.ModelConfig)}
    *tables, renamed = tables_of_the_page().values()
    assert not {name for name in fields if sum(name in table for table in tables) != 1}
    for name, default in DEFAULTS.items():
        if name in fields:
            theirs = fields[name].default
            assert getattr(theirs, "value", theirs) == default, name
    assert not set(renamed) & set(fields)
