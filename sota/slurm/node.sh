#!/bin/bash
# One node's part of grpo.sbatch, started there by srun: a Ray node, or torchrun with the ranks of this node.
# Usage: node.sh COMMAND [ARGUMENT ...]
#
# SIGUSR2 ends the command, and after 3 s kills what it started. SIGUSR1 asks its children, the ranks, for a checkpoint
# and the end, as Ctrl-C would: torchrun itself would kill them after 30 s, whatever they are at. SIGTERM is left to the
# batch script: `scancel` sends it to all at once, when a checkpoint is still to be written.
set -u
set -m # a command in the background takes no notice of SIGINT otherwise

trap : TERM # not ignored, which the command would inherit
temp=${GRPO_RL_RAY_TEMP:-}
if [ -n "$temp" ]; then
    mkdir -m 700 "$temp" 2>/dev/null || { [ -d "$temp" ] && [ ! -L "$temp" ] && [ -O "$temp" ] && chmod 700 "$temp"; } ||
        { echo "$temp can't be made, or is someone else's" >&2 && exit 1; }
fi

"$@" &
command=$!
force=
# shellcheck disable=SC2329 # a trap calls it
finish() { # torchrun waits 30 s for a rank that hangs, which is as long as SLURM waits for all
    kill -TERM "$command" 2>/dev/null
    if [ -z "$force" ]; then
        (sleep 3 && pkill -KILL -P "$command") &
        force=$!
    fi
}
trap finish USR2 INT
trap 'pkill -INT -P "$command"' USR1

code=0
wait "$command" || code=$?
while kill -0 "$command" 2>/dev/null; do # a signal has ended the wait, not the command
    wait "$command"
    code=$?
done
[ -z "$force" ] || kill -- "-$force" 2>/dev/null
[ -z "$temp" ] || rm -rf "$temp"
exit "$code"
