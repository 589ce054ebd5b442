"""The command `grpo-rl serve-policy`."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_serve_policy(parser: argparse.ArgumentParser) -> None:
    """Serves a model by OpenAI's chat API on loopback, as a run serves the policy to an agent: with the same parser of
    tool calls, record and refusals. Any key opens a session. Takes overrides of inference_model, sampling, model and
    train_model.dtype; requests choose temperature, top-p, top-k and min-p themselves. Ctrl-C ends it.
    """
    parser.usage = "grpo-rl serve-policy MODEL [--port N] [--tool-parser NAME] [overrides ...]"
    parser.add_argument("model", metavar="MODEL", help="a folder, a name on the hub, or a finished run")
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port (a free one)")
    parser.add_argument(
        "--tool-parser", metavar="NAME", help="vLLM's parser of the model's tool calls, or package.module:Class"
    )
    parser.set_defaults(run_command=_serve)


def _serve(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from grpo_rl.settings.compose import DEFAULT_CONFIG, compose_config
    from grpo_rl.settings.schema import Settings

    finished = Path(options.model, "model")
    name = str(finished) if (finished / "config.json").is_file() else options.model
    # The engine is started as for an agent's run.
    of_agent = ["env=agent", "env.scorer=gsm8k", "env.command=grpo-rl", f"model.name={name}"]
    of_agent += [f"env.tool_parser={options.tool_parser}"] if options.tool_parser else []
    settings = Settings.read(compose_config(DEFAULT_CONFIG, [*of_agent, *overrides]))
    from grpo_rl.serving.serving import serve_model

    return serve_model(settings, options.port)
