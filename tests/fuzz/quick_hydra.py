"""Keeps what Hydra makes anew at each call from files that don't change, which is most of a call's time.

The workers of `make fuzz` alone do so; its `--only`, like every test, reads with Hydra as it is. What comes from the
input is Hydra's own work in both, but an override is parsed once, though Hydra and the project ask several times.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import hydra._internal.defaults_list as hydra_defaults
import hydra.version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.default_element import ConfigDefault, GroupDefault
from hydra.core.override_parser import overrides_parser
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf, base, flag_override, grammar_parser
from omegaconf.errors import OmegaConfBaseException

from grpo_rl.settings.compose import FOLDER

SHIPPED = (f"file://{FOLDER}", "pkg://hydra.conf", "structured://")
"""The folders of the project's and Hydra's own config files."""
MOST = 1024
"""Results of a kind that are kept; all are forgotten when there are more."""
LONGEST = 10_000
"""Characters of a text whose result is kept: inputs have texts of a megabyte, too."""


@cache
def quicken() -> None:
    """Makes Hydra keep shipped files, parsed texts, choices and merged files, in this process and for good."""
    _keep_files()
    _keep_parsed_texts()
    _keep_choices()
    _keep_merged_files()


class _OwnUnpickler(pickle.Unpickler):
    """Reads what this process pickled, without the event for which the canaries watch."""

    def find_class(self, module: str, name: str) -> Any:
        return operator.attrgetter(name)(sys.modules[module])


def _copied(pickled: bytes) -> Any:
    return _OwnUnpickler(io.BytesIO(pickled)).load()  # a fifth of deepcopy's time


def _is_shipped(folder: str, name: str) -> bool:
    return folder in SHIPPED and ".." not in name


def _keep_files() -> None:
    Plugins.instance()  # imports the classes of sources anew

    def keeping(load: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
        kept: dict[tuple[str, str], bytes] = {}

        def load_config(self: Any, config_path: str) -> Any:
            if not _is_shipped(f"{self.scheme()}://{self.path}", config_path):
                return load(self, config_path)
            at = self.path, config_path
            if at not in kept:
                kept[at] = pickle.dumps(load(self, config_path))
            return _copied(kept[at])

        return load_config

    source: Any
    for source in SourcesRegistry.instance().types.values():
        source.load_config = keeping(source.load_config)
        source.__deepcopy__ = lambda self, memo: self  # Hydra copies all of its sources at each call


def _keep_parsed_texts() -> None:
    overrides_parser.create_functions = cache(overrides_parser.create_functions)
    parser = overrides_parser.OverridesParser
    override = lru_cache(8)(lambda text, rule, parse=parser.parse_rule: parse(parser.create(), text, rule))
    parser.parse_rule = lambda self, s, rule_name: copy.deepcopy(override(s, rule_name))
    interpolation = lru_cache(MOST)(grammar_parser.parse)
    base.parse = lambda value: interpolation(value) if len(value) < LONGEST else grammar_parser.parse(value)
    hydra.version._get_version = cache(hydra.version._get_version)


def _keep_choices() -> None:
    """Keeps the configs of choices, in which interpolations of a defaults list are looked up."""
    kept: dict[str, Any] = {}

    def create(overrides: Any, defaults_list: list, self_added: bool) -> Any:
        chosen: list[Any] = []
        for default in defaults_list:
            if self_added and default.is_self():
                continue
            if isinstance(default, ConfigDefault):
                chosen.append(default.get_config_path())
            elif isinstance(default, GroupDefault):
                chosen.append({default.get_override_key(): default.value})
        at = repr((overrides.known_choices, chosen))
        if at not in kept:
            choices = OmegaConf.create(overrides.known_choices)
            choices.defaults = chosen
            if len(kept) == MOST:
                kept.clear()
            if len(at) < LONGEST:
                kept[at] = choices
            return choices
        return kept[at]

    hydra_defaults._create_interpolation_map = create


def _keep_merged_files() -> None:
    """Keeps what the shipped files make together that come before the first of the input's own."""
    compose, load = ConfigLoaderImpl._compose_config_from_defaults_list, ConfigLoaderImpl._load_single_config
    kept: dict[tuple, bytes] = {}

    def composed(self: Any, defaults: list, repo: Any) -> Any:
        def is_shipped(default: Any) -> bool:
            return _is_shipped(repo.load_config(default.config_path).path, default.config_path)

        first = list(takewhile(is_shipped, defaults))
        at = tuple((default.config_path, default.package, default.is_self, default.primary) for default in first)
        if at not in kept:
            if len(kept) == MOST:
                kept.clear()
            merged = OmegaConf.create()
            try:
                with flag_override(merged, "no_deepcopy_set_nodes", True):
                    for default in first:
                        merged.merge_with(load(self, default, repo).config)
                kept[at] = pickle.dumps(merged)
            except (OmegaConfBaseException, RecursionError):
                return compose(self, defaults, repo)  # which tells the file
        # The first of the list is not loaded, as it is there: see loaded() below.
        return compose(self, [SimpleNamespace(config=_copied(kept[at])), *defaults[len(first) :]], repo)

    def loaded(self: Any, default: Any, repo: Any) -> Any:
        return default if isinstance(default, SimpleNamespace) else load(self, default, repo)

    ConfigLoaderImpl._compose_config_from_defaults_list = composed
    ConfigLoaderImpl._load_single_config = loaded
