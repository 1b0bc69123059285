#!/usr/bin/env bash
# Train on several local ranks: `spurline launch` with its options as environment variables.
#
#   NGPU=4 MODULE=deepseek_v3 CONFIG=deepseek_v3_debugmodel ./run_train.sh --parallelism.expert_parallel_degree 2
#
# NGPU      number of ranks: one per GPU, or CPU processes     (default 2)
# MODULE    model family                                       (default deepseek_v3)
# CONFIG    preset of that family; see `spurline configs`      (default deepseek_v3_debugmodel)
# LOG_RANK  ranks whose output is shown, comma-separated       (default 0)
# RESTARTS  how often all ranks are started again after one has failed (default 0)
# All arguments are passed to `spurline train`.
set -euo pipefail
cd "$(dirname "$0")"

for variable in NGPU=${NGPU:=2} RESTARTS=${RESTARTS:=0}; do
    if ! [[ $variable =~ ^(NGPU=[1-9][0-9]*|RESTARTS=[0-9]+)$ ]]; then
        echo "run_train.sh: ${variable%%=*} must be a number$([[ $variable != NGPU* ]] || echo ' of ranks'), got '${variable#*=}'" >&2
        exit 2
    fi
done
bin=$([ -x .venv/bin/spurline ] && echo .venv/bin/ || true)
exec "${bin}spurline" launch --ranks "$NGPU" --restarts "$RESTARTS" --log_rank "${LOG_RANK:-0}" -- \
    --module "${MODULE:-deepseek_v3}" --config "${CONFIG:-deepseek_v3_debugmodel}" "$@"
