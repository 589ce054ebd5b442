"""Both scripts train an agent that uses OpenAI's own client, two tools and a retry."""

import json
from pathlib import Path

import pytest
from tiny_runs import run_script
from transformers import AutoTokenizer

from grpo_rl.cli import main
from grpo_rl.evaluation.results import read_eval_file
from grpo_rl.monitor.metrics import read_metrics
from grpo_rl.testing import save_tiny_model

SOTA = Path(__file__).parents[2] / "sota"
AGENT = '''
import json, os, signal
from openai import OpenAI

def function(name, *parameters):
    properties = {parameter: {"type": "string"} for parameter in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}

TOOLS = [function("length", "text"), function("upper", "text")]
RUN = {"length": lambda text: str(len(text)), "upper": lambda text: text.upper()}

def solve(client, row):
    """Two rounds at most; a response without a call is asked for once again."""
    model = OpenAI(base_url=client.base_url, api_key=client.api_key)
    messages, retried = [{"role": "user", "content": row["question"]}], False
    for _ in range(3):
        answer = model.chat.completions.create(model=client.model, messages=messages, tools=TOOLS, seed=1)
        message = answer.choices[0].message
        if row["question"] == "2?" and messages[-1]["role"] == "tool":
            os.kill(os.getpid(), signal.SIGKILL)
        if not message.tool_calls:
            if retried:
                return message.content
            retried = True
            continue
        messages.append(message)
        for call in message.tool_calls:
            result = RUN[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None

class Parser:
    """A text whose first letter has an odd number calls each tool: a random model writes no format."""

    def __init__(self, tokenizer, tools): ...

    def parse(self, text):
        if not text or ord(text[0]) % 2 == 0:
            return text, []
        arguments = json.dumps({"text": text[:2]})
        return "", [{"type": "function", "function": {"name": name, "arguments": arguments}} for name in RUN]
'''


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    """A run of three steps of two groups of two or more sessions; the agents of one row are killed after a tool."""
    folder = tmp_path_factory.mktemp("agents")
    (folder / "solver.py").write_text(AGENT)
    rows = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny_model(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(model)
    # A template that takes tools and writes none: the context is short.
    tokenizer.chat_template = "{% if tools %}{% endif %}" + tokenizer.chat_template
    tokenizer.save_pretrained(model)
    return folder, [
        "env.dataset=agent", "env.agent=solver:solve", "env.tool_parser=solver:Parser", "env.scorer=gsm8k",
        f"model.name={model}", f"env.path={folder / 'rows.jsonl'}", "env.num_envs=2", "env.max_failed_fraction=1",
        "env.scorer_settings={system_prompt: null, reward: {correctness: 1, reasoning_format: 1, answer_format: 0,"
        " reasoning_pattern: '[0-9]', answer_pattern: x}}",
        "train.micro_batch_tokens=64", "train_model.compile=false", "sampling.max_new_tokens=6",
        "inference_model.max_model_len=128", "optimizer.lr=1e-2",
        f"env.eval_path={folder / 'rows.jsonl'}", "evaluate.rows=4", "evaluate.frequency=1",
    ]  # fmt: skip


@pytest.mark.nightly
def test_a_model_is_evaluated_through_an_agent_by_a_command(monkeypatch, overrides, tmp_path):
    folder, given = overrides
    monkeypatch.syspath_prepend(folder)
    others = ("env.dataset", "env.eval_path", "env.num_envs", "env.path")
    own = [word for word in given if word.startswith("env.") and not word.startswith(others)]
    words = ["tasks=[agent]", f"path.agent={folder / 'rows.jsonl'}", "samples=2", f"out={tmp_path / 'out'}"]
    words += ["engine=transformers", "max_model_len=128", "max_new_tokens=6", *own]
    assert main(["eval", str(folder / "model"), *words]) == 0
    _, tasks = read_eval_file(tmp_path / "out")
    assert tasks["agent"].scores.keys() >= {"reward", "accuracy", "pass@2"}
    assert len(tasks["agent"].scores["reward"]) == 4


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["grpo.py", "grpo_async.py"])
def test_both_scripts_train_an_agent_for_three_steps_with_vllm(monkeypatch, overrides, tmp_path, script):
    pytest.importorskip("vllm")
    folder, given = overrides
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    given = [*given, "env.repeats=6", "train.optim_batch_size=12", "train.total_dialog_turns=36"]
    run = run_script(SOTA / script, given, tmp_path / "run")
    assert {"eval_before", "eval_after", "eval_gain_ci95"} <= set(json.loads((run / "summary.json").read_text()))
    rows = read_metrics(run)
    assert len(rows) >= 3 and all({"eval/reward", "eval/reasoning_format", "eval/failed"} <= set(row) for row in rows)
    last = rows[-1]
    assert last["agents/sessions"] == last["total/responses"]  # what counts is of training alone
    assert last["agents/extended"] > 0 and last["agents/branches"] > 0 and last["agents/sequences"] >= 12
    assert last["failed/error"] > 0  # agents were killed in the middle
