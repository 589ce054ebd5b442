"""Hooks of mkdocs: adds the pages that lie beside docs/, and a page of the API for each folder, from its docstrings."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
ELSEWHERE = {
    "sota/README.md": "recipes.md",
    "benchmarks/README.md": "benchmarks.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Pages of the repository that become pages of the site."""
FOLDERS = ("envs", "losses", "data", "policies", "engines", "weights", "collectors", "training", "run", "settings")
"""Folders of the package whose docstrings make the API."""
COLAB = "https://colab.research.google.com/github"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """Adds the pages of the API to the navigation."""
    config.nav.append({"API": [f"api/{name}.md" for name in FOLDERS]})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages from elsewhere, their pictures, and those of the API."""
    for source, target in ELSEWHERE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text(encoding="utf-8")))
        for picture in sorted((ROOT / source).parent.glob("*.svg")) if "/" in source else []:
            files.append(File.generated(config, f"{Path(source).parent}/{picture.name}", abs_src_path=str(picture)))
    for name in FOLDERS:
        files.append(File.generated(config, f"api/{name}.md", content=api_page(name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Points links to where the site has the file; a link to a file that the site has not becomes its text.

    Next to a notebook comes a link to Colab, where mkdocs.yml has a ``repo_url`` on GitHub.
    """
    repository = (config["repo_url"] or "").rstrip("/").partition("github.com/")[2]
    home = next((source for source, target in ELSEWHERE.items() if target == page.file.src_uri), None)
    here = Path(home).parent.as_posix() if home else posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def moved(found: re.Match[str]) -> str:
        bang, text, link = found.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return found[0]
        path, hash_, anchor = link.partition("#")
        source = posixpath.normpath(posixpath.join(here, path))
        if source in ELSEWHERE:
            target = ELSEWHERE[source]
        elif source.startswith("docs/"):
            target = source.removeprefix("docs/")
        elif bang:
            target = source
        else:
            return f"{text} (`{source}`)" if text.strip("`") != source else f"`{source}`"
        start = posixpath.dirname(page.file.src_uri) or "."
        colab = f" ([open in Colab]({COLAB}/{repository}/blob/main/{source}))" if source.endswith(".ipynb") else ""
        return f"{bang}[{text}]({posixpath.relpath(target, start)}{hash_}{anchor})" + (colab if repository else "")

    return LINK.sub(moved, markdown)


def api_page(folder: str) -> str:
    """The page of a folder: its sentence, and each module's docstrings.

    Modules whose names begin with an underscore are left out.
    """
    root = ROOT / folder if folder == "envs" else ROOT / "grpo_rl" / folder
    lines = [f"# grpo_rl.{folder}", "", f"::: grpo_rl.{folder}", "    options: {members: false}", ""]
    for path in sorted(root.rglob("*.py")):
        if path.name.startswith("_"):
            continue
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        lines += [f"## {module}", "", f"::: grpo_rl.{folder}.{module}", "    options: {show_root_heading: false}", ""]
    return "\n".join(lines)
