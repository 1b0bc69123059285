"""The JobSet manifest, against the schema of its custom resource definition."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from spurline.train.exit_codes import ExitCode

RESOURCE = json.loads((Path(__file__).parent / "jobset_schema.json").read_text())
BASIC = ("--kubernetes", "--ranks", "8", "--nnodes", "4", "--image", "registry/spurline:0.2", "--volume", "runs:/runs")
ALL = (
    "--namespace",
    "ml",
    "--queue",
    "team",
    "--cpus",
    "32",
    "--memory",
    "900Gi",
    "--env",
    "A=b",
    "--interface",
    "eth0",
)


def check(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, RESOURCE["schema"])
    assert manifest["apiVersion"] == f"{RESOURCE['group']}/{RESOURCE['version']}"
    assert manifest["kind"] == "JobSet"


@pytest.mark.parametrize("options", [BASIC, (*BASIC, *ALL), (*BASIC, "--gpus", "0"), (*BASIC, "--nnodes", "2:4")])
def test_manifest_fits_the_schema(printed: Callable[..., str], options: tuple[str, ...]) -> None:
    check(yaml.safe_load(printed(*options)))


def test_schema_refuses_what_the_cluster_would(printed: Callable[..., str]) -> None:
    whole = yaml.safe_load(printed(*BASIC))
    for spoil in (
        lambda spec: spec.update(replicatedJob=[]),
        lambda spec: spec["failurePolicy"]["rules"][0].update(action="Restart"),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(parallelism="4"),
        lambda spec: pod_of(spec)["containers"][0].update(commands=[]),
        lambda spec: pod_of(spec)["containers"][0]["env"][0].update(value=1),
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(successPolicy={"rules": "0"}),
    ):
        manifest = copy.deepcopy(whole)
        spoil(manifest["spec"])
        with pytest.raises(jsonschema.ValidationError):
            check(manifest)


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def test_pods_meet_on_the_first_one_and_work_in_the_volume(printed: Callable[..., str]) -> None:
    spec = yaml.safe_load(printed(*BASIC, train=("--data.path", "/nowhere", "--data.text_field", "$(A)")))["spec"]
    job, pod = spec["replicatedJobs"][0]["template"]["spec"], pod_of(spec)
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (4, 4, "Indexed")
    (container,) = pod["containers"]
    command = container["command"]
    first = "deepseek-v3-debugmodel-node-0-0.deepseek-v3-debugmodel:29500"
    assert command[:4] == ["spurline", "launch", "--rdzv_endpoint", first]
    assert command[command.index("--nnodes") + 1] == "4"
    # A path of the cluster is not looked for here, and Kubernetes must not take $(A) for a variable.
    assert command[command.index("--") + 1 :] == [
        "--config", "deepseek_v3_debugmodel", "--data.path", "/nowhere", "--data.text_field", "$$(A)",
        "--job.dump_folder", "outputs/deepseek-v3-debugmodel-job",
    ]  # fmt: skip
    assert container["workingDir"] == "/runs"
    assert {"name": "runs", "mountPath": "/runs"} in container["volumeMounts"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert pod["terminationGracePeriodSeconds"] > 120
    assert pod["restartPolicy"] == "Never"  # what exit codes need


def test_spare_pod_that_never_got_a_node_does_not_keep_the_job_from_its_end(printed: Callable[..., str]) -> None:
    """Without a success policy, a Job is complete when each of its pods has succeeded."""

    def policy(*options: str) -> Any:
        return yaml.safe_load(printed(*BASIC, *options))["spec"]["replicatedJobs"][0]["template"]["spec"].get(
            "successPolicy"
        )

    assert policy("--nnodes", "2:4") == {"rules": [{"succeededIndexes": "0"}]}  # the pod that serves the rendezvous
    assert policy() is None


def test_exit_codes_decide_what_the_end_of_a_pod_means(printed: Callable[..., str]) -> None:
    spec = yaml.safe_load(printed(*BASIC))["spec"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"] for rule in rules if "onExitCodes" in rule for code in rule["onExitCodes"]["values"]
    }
    assert by_code == {2: "FailJob", 3: "FailJob", 4: "FailJob", 7: "FailJob", 75: "Ignore"}
    assert {ExitCode.LOST_RANK, ExitCode.WATCHDOG, ExitCode.FAILED}.isdisjoint(by_code)
