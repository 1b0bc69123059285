#!/usr/bin/env bash
# Train on several ranks of this machine, with torchrun.
#
#   NGPU=4 MODULE=deepseek_v3 CONFIG=deepseek_v3_debugmodel ./run_train.sh --parallelism.expert_parallel_degree 2
#
# NGPU      ranks: one per GPU, or as many CPU processes       (default 2)
# MODULE    model family, CONFIG its preset                    (`spurline configs` lists them)
# LOG_RANK  ranks whose output is shown, comma-separated       (default 0)
# Everything after the script's name goes to `spurline train`.
set -euo pipefail
cd "$(dirname "$0")"

NGPU=${NGPU:-2}
MODULE=${MODULE:-deepseek_v3}
CONFIG=${CONFIG:-deepseek_v3_debugmodel}
LOG_RANK=${LOG_RANK:-0}
if ! [[ $NGPU =~ ^[1-9][0-9]*$ ]]; then
    echo "run_train.sh: NGPU must be a number of ranks, got '$NGPU'" >&2
    exit 2
fi

bin=$([ -x .venv/bin/torchrun ] && echo .venv/bin/ || true)
train=(train --module "$MODULE" --config "$CONFIG" "$@")
for option in "$@"; do
    case $option in
    -h | --help | --dry-run | --dry_run) WORLD_SIZE=$NGPU exec "${bin}spurline" "${train[@]}" ;;
    esac
done
# Whatever is wrong with the options is told here: once, and before any rank starts.
WORLD_SIZE=$NGPU "${bin}spurline" "${train[@]}" --dry-run >/dev/null

# CPU ranks share the cores: one thread each, which torchrun would choose too, but not without a warning.
if ((NGPU > 1)); then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; fi
exec "${bin}torchrun" --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 -m spurline "${train[@]}"
