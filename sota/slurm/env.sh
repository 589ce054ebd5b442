# The environment of every process on every node: read by grpo.sbatch, carried to the other nodes by srun.
# Yours to edit: modules, the Python environment, the network. docs/cluster.md says what to look at when.

# The checkout's own environment (`make setup`), where there is one; otherwise whatever `python` is.
if [ -f .venv/bin/activate ]; then
    . .venv/bin/activate
fi

# Ray refuses whoever does not have the job's token, which grpo.sbatch writes into a file that only you can read. One in
# the environment would come before the file.
export RAY_AUTH_MODE=token
unset RAY_AUTH_TOKEN
export RAY_USAGE_STATS_ENABLED=0 # Ray reports to its makers otherwise

# Which network NCCL and Gloo (the CPU's collectives) make their connections by. Both guess; where they guess wrong, a
# run hangs at its first exchange. `ip -brief address` on two nodes shows the name: a prefix will do (ib, eth).
# InfiniBand itself is found without it.
# export NCCL_SOCKET_IFNAME=ib GLOO_SOCKET_IFNAME=ib0

# What NCCL says at its start: which network it took, and why not another. Not for good: it costs speed.
# export NCCL_DEBUG=INFO

# Not set, on purpose, as newer versions made them the default or fixed the cause:
# - TORCH_NCCL_ASYNC_ERROR_HANDLING: 3 by default, so that a rank whose peer is gone ends after the time limit of its
#   process group (https://docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html).
# - NCCL_CUMEM_ENABLE=0: older vLLM needed it for CUDA graphs; vLLM 0.32 does not read it, but for one transport
#   that wants 1 (https://github.com/vllm-project/vllm/pull/24141).
