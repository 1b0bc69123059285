"""A script for sbatch: one launcher per node, a signal before the time limit, and requeueing. Torch-free."""

from __future__ import annotations

import shlex

from spurline.launch.script import RETRIED, JobText, python, quoted
from spurline.train.exit_codes import ExitCode

SCRIPT = """\
#!/usr/bin/env bash
# Written by `spurline launch --slurm`. Submit it with: sbatch {file}
{directives}
# {notice} s before the time limit (up to a minute earlier) Slurm signals this script, as do notices of preemption: the
# run writes a checkpoint, and the job goes back into the queue, from where it resumes.
set -uo pipefail

python=${{SPURLINE_PYTHON:-{python}}}
run_folder={run_folder}
{exports}

# All nodes meet on the first one. Its name must resolve; RDZV_HOST is another way to reach it.
head=${{RDZV_HOST:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}}
port=$((10000 + SLURM_JOB_ID % 50000))

# A folder that only some nodes see would hold half a checkpoint.
token=$run_folder/.job-$SLURM_JOB_ID
if ! {{ mkdir -p "$run_folder" && touch "$token"; }}; then exit {usage}; fi
if ! srun --ntasks-per-node=1{no_kill} test -e "$token"; then
    echo "$run_folder is not on a disk that all nodes share: set --job.dump_folder" >&2
    exit {usage}
fi
rm -f "$token"

srun --ntasks-per-node=1 --kill-on-bad-exit=0 --cpu-bind=none{cpus}{no_kill} \\
    "$python" -m spurline launch --rdzv_endpoint "$head:$port" --rdzv_id "$SLURM_JOB_ID" \\
    {launch} -- \\
    {train} &
step=$!
signaled=0
trap 'signaled=1; kill -USR1 "$step"' USR1
trap 'signaled=1; kill -TERM "$step"' TERM
wait "$step"
code=$?
while ((signaled)); do # a signal ends `wait`, and the step goes on
    signaled=0
    wait "$step"
    again=$?
    ((again == 127)) || code=$again # 127: it had ended before the signal
done

# Slurm's own count of restarts includes those after a time limit.
failures=$run_folder/.failures-$SLURM_JOB_ID
case $code in
{stopped} | {retried}) ;; # stopped with a checkpoint, or a rank is lost or stuck
*)
    rm -f "$failures"
    exit "$code"
    ;;
esac
if ! scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then exit "$code"; fi # canceled, or preempted
if ((code == {stopped})); then
    rm -f "$failures"
else
    echo "$code" >>"$failures"
    if (($(wc -l <"$failures") > {requeues})); then
        echo "exit code $code again after the job was requeued {requeues} times in a row for a failure: giving up" >&2
        rm -f "$failures"
        exit "$code"
    fi
fi
echo "exit code $code: back into the queue" >&2
scontrol requeue "$SLURM_JOB_ID" || exit "$code"
"""


def sbatch_script(job: JobText, file: str) -> str:
    signals = "129 | 130 | 137 | 138 | 143"  # a rank or the launcher was killed by a signal, without a checkpoint
    return SCRIPT.format(
        file=file,
        directives="\n".join(f"#SBATCH {option}" for option in _directives(job)),
        notice=job.options.notice,
        python=shlex.quote(python()),
        run_folder=shlex.quote(job.run_folder),
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()),
        usage=int(ExitCode.USAGE),
        cpus=f" --cpus-per-task={job.options.cpus}" if job.options.cpus else "",  # srun does not inherit it
        no_kill=" --no-kill" if len(job.options.nodes) > 1 else "",
        launch=quoted(job.launch),
        train=quoted(job.train),
        stopped=int(ExitCode.STOPPED),
        retried=f"{' | '.join(str(int(code)) for code in RETRIED)} | {signals}",
        requeues=job.options.requeues,
    )


def _directives(job: JobText) -> list[str]:
    options = job.options
    found = [f"--job-name={job.name}", f"--nodes={options.nodes[-1]}", "--ntasks-per-node=1"]
    found += [f"--gpus-per-node={options.accelerators}"] if options.accelerators else []
    found += [f"--cpus-per-task={options.cpus}"] if options.cpus else ["--exclusive"]
    found += [f"--mem={options.memory}"] if options.memory else []
    found += [f"--{name}={value}" for name in ("time", "partition", "account") if (value := getattr(options, name))]
    found += [f"--signal=B:USR1@{options.notice}", "--requeue", "--open-mode=append", f"--output={job.name}-%j.out"]
    found += ["--no-kill"] if len(options.nodes) > 1 else []
    return found + [shlex.quote(option) for option in shlex.split(options.sbatch)]
