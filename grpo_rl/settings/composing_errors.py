"""One line for each way in which a config can't be composed: what was wrong, and the nearest name that exists."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from hydra._internal.config_repository import ConfigRepository
from hydra.core.default_element import DefaultsTreeNode, ResultDefault
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.plugins.config_source import ConfigSource

from grpo_rl.storage.masking import masked_override, masked_text
from grpo_rl.storage.yaml_text import fault

KINDS = {"": "config", "env": "task", "experiment": "recipe"}
"""The word for a member of each config group, where it is not the group's name; ``""``: files of the folder itself."""
OWN = "own"
"""The config of ``env`` behind ``env.task=module:Class``, which is never chosen by its name."""
NEEDS_PLUS = re.compile(r"To append to your default list use (\S+)")
NO_LIST = re.compile(r"Cannot merge DictConfig with ListConfig\s+full_key: (\S+)")
NO_HEADER = re.compile(r"In '(experiment/[^']+)': Could not override '([^'@]+)@experiment\.")
OF_A_PACKAGE = "behind `# @package` in the file or behind @ in a defaults list"
"""Where a package is written, as the end of a remedy."""
CHOSEN_ALREADY = re.compile(r"Multiple values for (\S+)\. To override a value use 'override \S+: (\S+)'")


def explained(error: Exception, arguments: Sequence[str] = (), folders: Iterable[Path] = ()) -> str:
    """The error of composing a config as one line, with the remedy, and with the command's secrets masked.

    Args:
        error: one for which :func:`of_composing` is true.
        arguments: the command line; a name that it does not hold is told with the file that does.
        folders: the folders with configs, whose names are offered for an unknown ``--config-name``.
    """
    line = _explained(error, arguments, folders)
    if isinstance(error, OverrideParseException):  # masked already
        return line
    hidden = {word: masked_override(word) for word in (" ".join(argument.split()) for argument in arguments)}
    secret = sorted((word for word in hidden if hidden[word] != word), key=len, reverse=True)
    for word in secret:
        line = line.replace(word, hidden[word])
    return masked_text(line) if secret else line  # of a sweep Hydra may quote a value in its own way


def of_composing(error: Exception) -> bool:
    """Tells whether the error is Hydra's, or one that it met while it read a config, which a user can correct."""
    return isinstance(error, HydraException) or bool(_file_of(error) or _wrong_group(error) or _wrong_defaults(error))


def _file_of(error: Exception) -> Path | None:
    """The config file that Hydra was reading when it met the error; None if it was doing something else."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals
        # The names of Hydra's sources of files and of packages.
        if isinstance(names.get("self"), ConfigSource) and (path := names.get("full_path") or names.get("res")):
            return Path(str(path)).resolve()
    return None


def no_name(override: Override) -> str:
    """The line about an override that gives a config group what is no name, with secrets masked."""
    key, _, value = masked_override(override.input_line).partition("=")
    bare = key.lstrip("+")
    if bare in ("env", "experiment", "loss"):
        valid = {"env": "env.dataset", "experiment": "+experiment"}.get(bare, bare)
    else:
        valid = bare if bare.startswith("hydra/") else key.replace("++", "+")
    file = f", or {valid}=\\'{value}\\' for the file {value}.yaml" if value.isdigit() else ""  # \: for the shell
    return f"{key}={value}: a config is chosen by its name; write {valid}=NAME{file}"


def _wrong_group(error: Exception) -> str | None:
    """The line about an override of a config group that Hydra refuses; None if the error is another one."""
    frames = traceback.walk_tb(error.__traceback__)
    override = next((frame.f_locals["override"] for frame, _ in frames if "override" in frame.f_locals), None)
    refused = isinstance(override, Override) and "Config group override" in str(error)
    return no_name(override) if refused else None


def _wrong_defaults(error: BaseException) -> str | None:
    """The line about a file whose ``defaults`` or package Hydra does not take; None if the error is another one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    nodes = [node for frame in frames if isinstance(node := frame.f_locals.get("root"), DefaultsTreeNode)]
    if isinstance(error, RecursionError):
        merging = [frame.f_locals for frame in frames if frame.f_code.co_name == "_compose_config_from_defaults_list"]
        if merging and (default := merging[-1].get("default")):  # the file at hand in Hydra's loop that merges them
            return _too_deep(default)
        return _circle(nodes[-1]) if nodes else None
    if not frames or not str(frames[-1].f_globals.get("__name__")).startswith(("hydra.", "omegaconf.")):
        return None  # such as the import of a package that failed
    if frames[-1].f_code.co_name == "_check_not_missing" and nodes[-1].parent:  # its parent has ??? in its list
        return _not_taken(nodes[-1].parent.node.get_config_path(), "", error)
    for place, frame in reversed(list(enumerate(frames))):
        variables = frame.f_locals
        if frame.f_code.co_name == "_update_overrides" and isinstance(error, AssertionError):
            return _not_taken(variables["parent"].get_config_path(), "", error)
        source = variables.get("source")
        if isinstance(variables.get("self"), ConfigRepository) and isinstance(source, ConfigSource):
            if variables.get("ret") is None:  # it was looking for the file
                return None
            folder = source.path.replace(".", "/") if source.scheme() == "pkg" else source.path
            return _not_taken(variables["config_path"], f"{folder}/", error)
        if frame.f_code.co_name == "_embed_result_config":
            name, package = frames[place - 1].f_locals["config_path"], repr(variables["package"][:80])
            return f"{name}.yaml: its keys can't be put at {package}; correct the package, {OF_A_PACKAGE}"
    if not nodes or not isinstance(error, AssertionError):
        return None
    return _not_taken(_holder_of(nodes[-1]), "", error)  # such as a group without a name


def _holder_of(item: DefaultsTreeNode) -> str:
    """The name of the config whose list has an item that Hydra does not take."""
    try:
        return item.node.get_config_path()
    except AssertionError:  # it is the item itself
        return item.parent.node.get_config_path() if item.parent else ""


def _not_taken(name: str, folder: str, error: BaseException) -> str:
    name, group = name.removesuffix(".yaml"), name.rpartition("/")[0]
    # Hydra's `assert isinstance(key, str)` has no message.
    reason = masked_text(_joined(error).removeprefix(f"In {name}: ")) or "an item of a wrong kind"
    examples = {"": "[grpo_gsm8k, {override loss: dapo}, _self_]", "experiment": "[{override /loss: dapo}, _self_]"}
    example = examples.get(group, "[NAME, _self_]")
    return f"{folder}{name}.yaml: Hydra does not take its defaults ({reason}); write them as in {example}"


def _too_deep(default: ResultDefault) -> str:
    """The line about a file whose keys are too deep to merge: by a package that it has, or gets in a defaults list."""
    name, package = str(default.config_path).removesuffix(".yaml"), default.package or ""
    asked = f", asked for by {default.parent}.yaml," if default.parent and default.parent != name else ""
    what = f"{name}.yaml{asked} has the package {package[:80] + '...'!r} of {package.count('.') + 1} levels"
    return f"{what}, too many with those of its keys; shorten it, {OF_A_PACKAGE}"


def _circle(innermost: DefaultsTreeNode) -> str | None:
    """The line about defaults that lead to themselves; None if they do not."""
    node: DefaultsTreeNode | None = innermost
    path: list[str] = []
    while node is not None and not node.node.is_virtual():
        path.insert(0, node.node.get_config_path())
        node = node.parent
    for at, name in enumerate(path):
        if name in path[:at]:
            return f"the defaults go in a circle, {' -> '.join(path[path.index(name) : at + 1])}; remove one of these"
    return None


def unreadable(path: Path, error: BaseException) -> str:
    """The line about a config file that can't be read.

    Args:
        path: the file.
        error: what reading it raised: PyYAML and OmegaConf raise nearly any kind, such as KeyError for ``!!bool x``.
    """
    if isinstance(error, OSError):  # OmegaConf's has no number
        return f"{path} can't be read: {error.strerror}" if error.errno else f"{path} holds no settings ({error})"
    if isinstance(error, UnicodeDecodeError):
        return f"{path} is not encoded in UTF-8 ({error.reason}); save it as UTF-8"
    if isinstance(error, RecursionError) or isinstance(error.__cause__, RecursionError):
        return f"{path} is no YAML of settings: a value is nested too deeply, or holds itself; flatten it"
    if what := fault(error):
        return f"{path}, {what}; correct that line"
    return f"{path} is no YAML of settings: {_joined(error)}"


def _explained(error: Exception, arguments: Sequence[str], folders: Iterable[Path]) -> str:
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = error.options or sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
        known = [member for member in known if (group, member) != ("env", OWN)]
        line = unknown(KINDS.get(group, group), name, known)
        return line if any(name in word for word in arguments) else f"{_holder(name, folders)}{line}"
    if isinstance(error, ConfigCompositionException) and (plus := NEEDS_PLUS.search(str(error))):
        return f"{plus[1].lstrip('+')} adds a config that the command did not have; write it with a plus: {plus[1]}"
    if isinstance(error, ConfigCompositionException) and (twice := CHOSEN_ALREADY.search(str(error))):
        return f"{twice[1]} is chosen already, and a plus adds another; write {twice[1]}={twice[2]} without it"
    if isinstance(error, ConfigCompositionException) and (lacks := NO_HEADER.search(str(error))):
        return f"{lacks[1]}.yaml overrides {lacks[2]} in itself; begin the file with the line `# @package _global_`"
    if isinstance(error, ConfigCompositionException) and (section := NO_LIST.search(f"{error} {error.__cause__}")):
        return f"{section[1]} is a section, and takes no list; set its keys, such as {section[1]}.KEY=VALUE"
    if isinstance(error, OverrideParseException):
        shown = masked_override(error.override)
        # Hydra's reason has parts of the value.
        what = f" ({_joined(error).partition(' See https')[0]})" if shown == error.override else ""
        return f"{shown!r} can't be read as KEY=VALUE{what}; quote texts with signs in them: 'KEY=\"a, b\"'"
    if path := _file_of(error):
        wrapped = isinstance(error, ConfigCompositionException) and error.__cause__
        return unreadable(path, wrapped or error)
    cause = error.__cause__ if isinstance(error, HydraException) else None
    met = cause if isinstance(error, HydraException) else error
    if line := _wrong_group(error) or (_wrong_defaults(met) if met else None):
        return line
    what, why = _joined(error), _joined(cause) if cause else ""
    return f"{what} ({why})" if what and why else what or why or type(error).__name__


def _holder(name: str, folders: Iterable[Path]) -> str:
    """The file that asks for a config of this name, as the beginning of a line."""
    files = (path for folder in folders for path in sorted(folder.rglob("*.yaml")))
    holds = re.compile(rf"\b{re.escape(name)}\b")
    return next((f"{path}: " for path in files if holds.search(path.read_text("utf-8", errors="replace"))), "")


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The line about a name that does not exist.

    >>> unknown("loss", "drgrpo", ["dapo", "dr_grpo"])
    "unknown loss 'drgrpo'; did you mean dr_grpo? (all: dapo, dr_grpo)"
    >>> unknown("recipe", "x", [])
    "unknown recipe 'x'; there is none"
    """
    known = list(known)
    if not known:
        return f"unknown {kind} {name!r}; there is none"
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"did you mean {close[0]}? (all: {', '.join(known)})" if close else f"choose one of {', '.join(known)}"
    return f"unknown {kind} {name!r}; {guess}"


def _joined(error: BaseException) -> str:
    return " ".join(str(error).split())
