# syntax=docker/dockerfile:1
# grpo_rl and what training needs, for CPUs or, with BACKEND=cuda, for NVIDIA GPUs. EXTRAS: more extras, as in ,ray,lora:
# ray for --async, lora for adapters, sweep for hydra/sweeper=optuna
#
#   docker build -t grpo-rl .
#   docker run --rm -v grpo-rl-work:/work -v grpo-rl-cache:/cache grpo-rl train +experiment=quickstart
#   docker run --rm -v grpo-rl-work:/work -v grpo-rl-cache:/cache -v "$PWD:/data:ro" grpo-rl train env.path=/data/train.jsonl
#
#   docker build --build-arg BACKEND=cuda --build-arg EXTRAS=,ray -t grpo-rl:cuda .
#   docker run --rm --gpus all --shm-size 16g -v grpo-rl-work:/work -v grpo-rl-cache:/cache grpo-rl:cuda train --async
#
# Runs are written to /work/outputs, models and data sets to /cache.
ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS build
WORKDIR /source
COPY . .
RUN --mount=type=cache,target=/root/.cache/pip \
    python -m pip wheel --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG BACKEND=cpu
ARG EXTRAS=
# g++ for the kernels that torch and Triton compile, libnuma for vLLM's on CPUs. The base image fixes their versions.
# hadolint ignore=DL3008
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ libnuma1 && \
    rm -rf /var/lib/apt/lists/* && \
    useradd --uid 1000 --home-dir /cache --create-home grpo && \
    install --directory --owner=grpo /work
# PyPI has no CPU builds of torch for Linux; PyTorch's own index has. setup.py has the versions.
# hadolint ignore=DL3013
RUN --mount=type=cache,target=/root/.cache/pip --mount=type=bind,from=build,source=/wheels,target=/wheels \
    case "$BACKEND" in \
        cpu) set -- "cpu$EXTRAS" --extra-index-url https://download.pytorch.org/whl/cpu ;; \
        cuda) set -- "vllm$EXTRAS" ;; \
        *) echo "BACKEND=$BACKEND; it can be cpu or cuda" >&2 && exit 1 ;; \
    esac && \
    extras=$1 && shift && \
    python -m pip install "$(echo /wheels/grpo_rl-*.whl)[$extras]" "$@"
ENV HOME=/cache \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    NVIDIA_VISIBLE_DEVICES=all \
    PYTHONUNBUFFERED=1
USER 1000
WORKDIR /work
VOLUME ["/work", "/cache"]
ENTRYPOINT ["grpo-rl"]
CMD ["--help"]
