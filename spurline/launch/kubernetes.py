"""A JobSet manifest: one pod per node with a stable name, restarted depending on the exit code. Torch-free."""

from __future__ import annotations

import re
from typing import Any

from spurline.launch.options import DEFAULT_PORT, Options
from spurline.launch.script import FINAL, JobText
from spurline.train.exit_codes import ExitCode

_NODE = "node"
HEAD = """\
# Written by `spurline launch --kubernetes`. Submit it with: kubectl apply -f {file}
# It needs the JobSet controller (jobset.sigs.k8s.io, v1alpha2) in the cluster.
"""


def manifest(job: JobText, file: str) -> str:
    import yaml

    return HEAD.format(file=file) + yaml.safe_dump(job_set(job), sort_keys=False, width=120)


def job_set(job: JobText) -> dict[str, Any]:
    options = job.options
    metadata: dict[str, Any] = {"name": job.name}
    if options.namespace:
        metadata["namespace"] = options.namespace
    if options.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": options.queue}
    nodes = options.nodes[-1]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        # A job that fails with a final exit code is not restarted; any other failure restarts all pods.
        "failurePolicy": {
            "maxRestarts": options.requeues,
            "rules": [
                {"name": "FinalExitCode", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]},
            ],
        },
        "replicatedJobs": [
            {
                "name": _NODE,
                "replicas": 1,
                "template": {
                    "spec": {
                        "parallelism": nodes,
                        "completions": nodes,
                        "completionMode": "Indexed",
                        # The pod of a lost node is recreated and joins the others; all must end together.
                        "backoffLimit": nodes * options.requeues,
                        "podFailurePolicy": {"rules": _rules()},
                        **_success_policy(options),
                        "template": {"spec": _pod(job)},
                    }
                },
            }
        ],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": spec}


def name_problems(name: str, options: Options) -> list[str]:
    """Why pod names can't start with this name: they must be valid DNS labels."""
    last = f"{name}-{_NODE}-0-{options.nodes[-1] - 1}"
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(last) > 63:
        return [
            f"--name {name}: pods would be named {last}, which must begin with a letter and have 63 letters at most"
        ]
    return []


def _rules() -> list[dict[str, Any]]:
    """The pod failure policy: fail the job on final exit codes, and don't count preemptions as failures."""

    def on(action: str, codes: list[int]) -> dict[str, Any]:
        return {"action": action, "onExitCodes": {"containerName": _NODE, "operator": "In", "values": codes}}

    disruption = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return [on("FailJob", sorted(map(int, FINAL))), on("Ignore", [int(ExitCode.STOPPED)]), disruption]


def _success_policy(options: Options) -> dict[str, Any]:
    """With spare nodes, the job is complete with its first pod: a spare one may get a node only after the run."""
    return {"successPolicy": {"rules": [{"succeededIndexes": "0"}]}} if len(options.nodes) > 1 else {}


def _pod(job: JobText) -> dict[str, Any]:
    options = job.options
    claim, _, path = options.volume.partition(":")
    endpoint = f"{job.name}-{_NODE}-0-0.{job.name}:{DEFAULT_PORT}"
    limits: dict[str, Any] = {options.gpu_resource: options.accelerators} if options.accelerators else {}
    limits |= {"memory": options.memory} if options.memory else {}
    requests = {"cpu": options.cpus} if options.cpus else {}
    command = ["spurline", "launch", "--rdzv_endpoint", endpoint, "--rdzv_id", job.name, *job.launch]
    container: dict[str, Any] = {
        "name": _NODE,
        "image": options.image,
        "workingDir": path,
        # Kubernetes expands $(NAME) in commands, unless it is escaped as $$(NAME).
        "command": [word.replace("$(", "$$(") for word in (*command, "--", *job.train)],
        "env": [{"name": name, "value": value} for name, value in job.variables().items()],
        "ports": [{"containerPort": DEFAULT_PORT}],
        "volumeMounts": [{"name": "runs", "mountPath": path}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    resources = {kind: value for kind, value in (("requests", requests), ("limits", limits)) if value}
    if resources:
        container["resources"] = resources
    return {
        "restartPolicy": "Never",
        # From SIGTERM to SIGKILL: time for a checkpoint and for ranks to exit.
        "terminationGracePeriodSeconds": options.notice + 30,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
