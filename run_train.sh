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

bin=$([ -x .venv/bin/torchrun ] && echo .venv/bin/ || true)
# CPU ranks share the cores; torchrun's own default of one thread each is right for them.
exec "${bin}torchrun" --nproc-per-node "$NGPU" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
    --local-ranks-filter "$LOG_RANK" --role rank --tee 3 \
    -m spurline train --module "$MODULE" --config "$CONFIG" "$@"
