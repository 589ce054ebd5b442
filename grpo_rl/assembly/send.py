"""``grpo-rl send``: the metrics and responses of a run, sent to loggers again."""

import argparse
from collections.abc import Sequence
from pathlib import Path


def add_send(parser: argparse.ArgumentParser) -> None:
    """Gives metrics and responses of a run to the loggers of its config once more, in the place of what they have of
    it; logger.backend=NAME chooses another. Settings that were secret are given again: logger.settings.NAME.KEY=VALUE.
    """
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder")
    parser.set_defaults(run_command=_send)


def _send(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    from omegaconf import OmegaConf

    from grpo_rl.monitor.loggers import open_loggers
    from grpo_rl.report.files import CONFIG

    if wrong := [word for word in overrides if not word.lstrip("+").startswith("logger.")]:
        raise ValueError(f"{wrong[0]} is no setting of a logger; send takes logger.KEY=VALUE")
    if not (options.run / CONFIG).is_file():
        raise ValueError(f"{options.run} is not a run folder; give one like outputs/2026-01-31/12-00-00")
    stored = OmegaConf.load(options.run / CONFIG)
    config = OmegaConf.merge(stored, OmegaConf.from_dotlist([word.lstrip("+") for word in overrides]))
    values = OmegaConf.to_container(config)
    loggers = open_loggers(values["logger"], options.run, values, print, again=True)
    if not loggers:
        raise ValueError("the run has no logger; choose one by logger.backend=NAME")
    loggers.close()
    return 0
