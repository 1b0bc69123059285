"""A script that starts plain torchrun on one node of several. Torch-free."""

from __future__ import annotations

import shlex

from spurline.launch.options import DEFAULT_PORT
from spurline.launch.script import JobText, python, quoted

SCRIPT = """\
#!/usr/bin/env bash
# Written by `spurline launch --torchrun`. Start it on every node, with the name of the first one:
#
#   bash {file} FIRST_NODE
#
# The run folder must be on a disk that all nodes share. torchrun ends with 1 when a rank has failed; `spurline launch`
# ends with the code of the run, and lets a node that has been replaced join again.
set -euo pipefail

head=${{1:?the name or address of the first node}}
python=${{SPURLINE_PYTHON:-{python}}}
{exports}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={notice}
# Where this machine's name resolves to another address, set LOCAL_ADDR to the one that the other nodes reach.
exec "$python" -m torch.distributed.run --nnodes {nnodes} --nproc-per-node {ranks} \\
    --rdzv-backend c10d --rdzv-endpoint "$head:{port}" --rdzv-id {name} --rdzv-conf join_timeout={join_timeout} \\
    --max-restarts {restarts} --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \\
    ${{LOCAL_ADDR:+--local-addr "$LOCAL_ADDR"}} --local-ranks-filter {log_rank} --role rank --tee 3 \\
    -m spurline train \\
    {train}
"""


def torchrun_script(job: JobText, file: str) -> str:
    options = job.options
    return SCRIPT.format(
        file=file,
        python=shlex.quote(python()),
        exports="\n".join(f"export {name}={shlex.quote(value)}" for name, value in job.variables().items()),
        notice=options.notice,
        nnodes=options.nnodes,
        ranks=options.ranks,
        port=DEFAULT_PORT,
        name=job.name,
        join_timeout=options.join_timeout,
        restarts=job.restarts,
        log_rank=options.log_rank,
        train=quoted(job.train),
    )
