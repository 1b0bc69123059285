#!/usr/bin/env bash
# Train on several local ranks with torchrun.
#
#   NGPU=4 MODULE=deepseek_v3 CONFIG=deepseek_v3_debugmodel ./run_train.sh --parallelism.expert_parallel_degree 2
#
# NGPU      number of ranks: one per GPU, or CPU processes     (default 2)
# MODULE    model family                                       (default deepseek_v3)
# CONFIG    preset of that family; see `spurline configs`      (default deepseek_v3_debugmodel)
# LOG_RANK  ranks whose output is shown, comma-separated       (default 0)
# RESTARTS  how often torchrun starts all ranks again after one has failed (default 0)
# All arguments are passed to `spurline train`.
set -euo pipefail
cd "$(dirname "$0")"

NGPU=${NGPU:-2}
MODULE=${MODULE:-deepseek_v3}
CONFIG=${CONFIG:-deepseek_v3_debugmodel}
LOG_RANK=${LOG_RANK:-0}
RESTARTS=${RESTARTS:-0}
if ! [[ $NGPU =~ ^[1-9][0-9]*$ ]]; then
    echo "run_train.sh: NGPU must be a number of ranks, got '$NGPU'" >&2
    exit 2
fi
if ! [[ $RESTARTS =~ ^[0-9]+$ ]]; then
    echo "run_train.sh: RESTARTS must be a number, got '$RESTARTS'" >&2
    exit 2
fi

bin=$([ -x .venv/bin/torchrun ] && echo .venv/bin/ || true)
train=(train --module "$MODULE" --config "$CONFIG" "$@")
for option in "$@"; do
    case $option in
    -h | --help | --dry-run | --dry_run) WORLD_SIZE=$NGPU exec "${bin}spurline" "${train[@]}" ;;
    esac
done
# Report errors in the options once, before any rank starts.
WORLD_SIZE=$NGPU "${bin}spurline" "${train[@]}" --dry-run >/dev/null

# CPU ranks share the cores: one thread each. This is torchrun's default too, but it prints a warning.
if ((NGPU > 1)); then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; fi
exec "${bin}torchrun" --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --max-restarts "$RESTARTS" --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 -m spurline "${train[@]}"
