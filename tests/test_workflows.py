"""The workflows of GitHub run what there is: targets of the Makefile, files, and versions that the package supports."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from spurline import __version__

ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
ON_NODE_24 = {  # the first major version of each action whose action.yml says node24
    "actions/checkout": 5,
    "actions/setup-python": 6,
    "actions/upload-artifact": 6,
    "actions/download-artifact": 7,
    "actions/upload-pages-artifact": 5,  # composite, with upload-artifact@v7
    "actions/deploy-pages": 5,
}
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def test_there_is_one_for_each_purpose() -> None:
    made = {step["run"] for workflow in WORKFLOWS.values() for step in steps_of(workflow) if "run" in step}
    assert {"make test", "make docs", "make release", "make test-slow", "make verify"} <= made


@pytest.mark.parametrize("name", sorted(WORKFLOWS))
def test_workflow_runs_what_there_is(name: str) -> None:
    workflow = WORKFLOWS[name]
    assert workflow["name"] == name
    assert workflow["permissions"] == {"contents": "read"}  # a job that needs more says so
    assert workflow[True]  # `on`, which YAML takes for a boolean
    for step in steps_of(workflow):
        assert ("run" in step) != ("uses" in step)
        for target in re.findall(r"\bmake (\S+)", step.get("run", "")):
            assert target in TARGETS
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[\w./]+", step["uses"])
        for path in str(step.get("with", {}).get("cache-dependency-path", "")).split():
            assert (ROOT / path).is_file()
    for job in workflow["jobs"].values():
        needed = [job["needs"]] if isinstance(job.get("needs"), str) else job.get("needs", [])
        assert set(needed) <= workflow["jobs"].keys()


def test_actions_run_on_a_node_that_runners_have() -> None:
    """GitHub removed Node 20 from its runners in autumn 2026."""
    used = {step["uses"] for workflow in WORKFLOWS.values() for step in steps_of(workflow) if "uses" in step}
    versions = dict(action.split("@") for action in used)
    assert versions.pop("pypa/gh-action-pypi-publish") == "release/v1"  # runs in a container
    assert len(versions) == len(used) - 1  # one version of each
    assert {name for name, version in versions.items() if int(version.removeprefix("v")) < ON_NODE_24[name]} == set()


def test_version_is_the_newest_release_or_leads_to_the_next() -> None:
    """A wheel of the main branch has another name than the release's."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, date = re.findall(r"^## (\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2})\)$", changelog, re.MULTILINE)[0]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], str(citation["date-released"])) == (version, date)
    assert 'path = "spurline/version.py"\n' in (ROOT / "pyproject.toml").read_text()  # the only place of the number
    if "\n## Unreleased\n" not in changelog:
        assert __version__ == version
        return
    upcoming, dev, _ = __version__.partition(".dev0")
    assert dev
    assert [*map(int, upcoming.split("."))] > [*map(int, version.split("."))]
