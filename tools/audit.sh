#!/usr/bin/env bash
# Known vulnerabilities of what `pip install grpo-rl[cpu]` resolves to; options go to pip-audit. Nothing of it is
# installed: uv resolves it, and pip-audit asks the advisory database, both in an environment that is removed at the end.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet "uv>=0.9,<1" "pip-audit>=2.10,<3"
# PyPI has no CPU build of torch: as docs/runs.md says, PyTorch's index has.
"$folder/venv/bin/uv" pip compile setup.py --extra cpu --quiet --no-header --no-annotate \
  --extra-index-url https://download.pytorch.org/whl/cpu --index-strategy unsafe-best-match --output-file "$folder/resolved"
# The database knows 2.13.0, not 2.13.0+cpu.
sed 's/+[A-Za-z0-9.]*//' "$folder/resolved" >"$folder/requirements.txt"
echo "$(wc -l <"$folder/requirements.txt") packages"
"$folder/venv/bin/pip-audit" --requirement "$folder/requirements.txt" --no-deps --disable-pip --progress-spinner off "$@"
