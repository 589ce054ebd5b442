"""Checks a user's own config files by themselves, so that an error names the file and the line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import yaml
from hydra.plugins.config_source import ConfigSource
from omegaconf import DictConfig, OmegaConf

from grpo_rl.settings.declaration import select
from grpo_rl.settings.schema import UNSET, check_keys
from grpo_rl.settings.sections import declarations

NO_SETTINGS = ("defaults", "hydra")
"""Keys of a file that are Hydra's own."""
HEADER = 512
"""Characters of a file in which Hydra looks for `# @package`, before any other line."""


def own_files(hydra: DictConfig, shipped: Path) -> Iterator[tuple[Path, str]]:
    """The files outside the folder ``shipped`` that a config was composed of, each with the place of its keys in it.

    Args:
        hydra: Hydra's section of the config.

    Raises:
        ValueError: Hydra never reads a chosen file, as one of ``shipped`` has its name.
    """
    folders = [Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file"]
    for group, name in {"": hydra.job.config_name, **hydra.runtime.choices}.items():
        if not name or str(group).startswith("hydra"):
            continue
        member = Path(str(group), f"{str(name).removesuffix('.yaml')}.yaml")
        there = [folder for folder in folders if (folder / member).is_file()]  # Hydra reads the first
        if not there:  # it is of a package
            continue
        path = there[0] / member
        if there[0].resolve() == shipped:
            for other in (folder / member for folder in there[1:]):
                if other.read_bytes() != path.read_bytes():  # a copy does no harm
                    raise ValueError(f"{other} is never read, as {path} has its name and comes first; rename it")
            continue
        package = ConfigSource._get_header_dict(path.read_text(encoding="utf-8")[:HEADER])["package"]
        place = str(group).replace("/", ".") if package is None else package
        yield path, "" if place in ("", "_global_") else f"{place}."


def check_own_files(files: Iterable[tuple[Path, str]], dataset: str | None) -> None:
    """Refuses a file with an unknown key, or with a value of the wrong type or out of range.

    Raises:
        ValueError: names the file and the line, and says what :class:`Settings` would say of the key.
    """
    known = declarations(dataset)
    for path, place in files:
        values = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        tree = yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader)
        for key, name, number in _keys(tree, "", place, known):
            where = f"{path}, line {number}: "
            try:
                check_keys([name], dataset)
            except ValueError as error:
                line = f"{key} is read as {name}; begin the file with the line `# @package _global_`"
                lacks_header = place == "experiment." or (place and key in known)
                raise ValueError(f"{where}{line if lacks_header else error}") from None
            value, setting = select(values, key), known.get(name)
            if setting is None or value == UNSET or "${" in str(value):
                continue
            if wrong := setting.wrong_type(name, value) or setting.wrong_value(name, value):
                raise ValueError(f"{where}{wrong}")


def _keys(node: yaml.Node | None, within: str, place: str, known: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Every key of a file that is no section: its name in the file, its name in the config, and its line."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = within + str(key.value)
        if name in NO_SETTINGS or key.value == "<<":
            continue
        if isinstance(value, yaml.MappingNode) and place + name not in known:
            yield from _keys(value, f"{name}.", place, known)
        else:
            yield name, place + name, key.start_mark.line + 1
