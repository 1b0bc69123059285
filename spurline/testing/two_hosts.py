"""Lose and restore one of two hosts, simulated on one machine as namespaces with their own addresses and process ids.

    python -m spurline.testing.two_hosts [--seed 3] [--folder /tmp/two_hosts]

trains with FSDP2 and EP on 2 hosts x 2 gloo ranks, one `spurline launch` per host: once undisturbed, and once with the
second host unplugged and killed in the middle of a random step and then restarted. Both runs must end with the same
bytes. It needs Linux, `ip` (iproute2) and permission to create namespaces (root).
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from spurline.testing.run_result import run_result
from spurline.testing.tiny import write_words

HOSTS = ("a", "b")
ADDRESS = {"a": "10.77.0.1", "b": "10.77.0.2"}
STEPS = 12
# Two layers, one of them MoE; 8 x 16 tokens per step.
OPTIONS = f"""
--config deepseek_v3_debugmodel --data.validation_fraction 0.1 --training.threads 1 --training.steps {STEPS}
--training.seq_len 16 --training.local_batch_size 2 --optimizer.lr 4e-3 --lr_scheduler.warmup_steps 2
--metrics.validation_batches 1 --metrics.sample_tokens 0 --metrics.no_tensorboard --metrics.no_report
--metrics.log_interval 1 --model.vocab_size 257 --model.dim 16 --model.num_layers 2 --model.dense_hidden_dim 24
--model.num_heads 2 --model.q_lora_rank 8 --model.kv_lora_rank 8 --model.qk_nope_head_dim 4 --model.qk_rope_head_dim 4
--model.v_head_dim 4 --model.moe.hidden_dim 16 --model.moe.num_experts 4 --model.moe.top_k 2
--parallelism.expert_parallel_degree 2 --checkpoint.enable --checkpoint.interval 2 --comm.watchdog_seconds 10
"""


class Hosts:
    """Two network namespaces, joined by a cable (veth). No command sees the processes of another one."""

    def __init__(self) -> None:
        self._space = {host: f"spurline-{host}-{os.getpid()}" for host in HOSTS}

    def __enter__(self) -> Hosts:
        for space in self._space.values():
            _ip("netns", "add", space)
        a, b = self._space.values()
        _ip("link", "add", "cable", "netns", a, "type", "veth", "peer", "name", "cable", "netns", b)
        for host, space in self._space.items():
            _ip("-n", space, "address", "add", f"{ADDRESS[host]}/24", "dev", "cable")
            _ip("-n", space, "link", "set", "lo", "up")
            self.plug(host)
        return self

    def __exit__(self, *exception: object) -> None:
        for host, space in self._space.items():
            self.kill(host)
            _ip("netns", "delete", space)

    def start(self, host: str, command: list[str], **variables: str) -> subprocess.Popen[str]:
        """Start a command on a host."""
        own_pids = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        words = ["ip", "netns", "exec", self._space[host], *own_pids, *command]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env={**os.environ, **variables}, stdout=pipe, stderr=pipe, text=True)

    def plug(self, host: str) -> None:
        _ip("-n", self._space[host], "link", "set", "cable", "up")

    def unplug(self, host: str) -> None:
        _ip("-n", self._space[host], "link", "set", "cable", "down")

    def kill(self, host: str) -> None:
        """Kill all processes of a host."""
        while pids := _ip("netns", "pids", self._space[host]).split():
            for pid in pids:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)


def why_not() -> str:
    """Why hosts can't be created on this machine; empty if they can."""
    try:
        with Hosts():
            return ""
    except FileNotFoundError:
        return "`ip` is not installed (iproute2)"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr.strip()}"


def launch(hosts: Hosts, host: str, text: Path, folder: Path, **variables: str) -> subprocess.Popen[str]:
    return hosts.start(host, launch_command(text, folder), **variables)


def launch_command(text: Path, folder: Path, nodes: str = "2", meet_at: str = "a") -> list[str]:
    command = [sys.executable, "-m", "spurline", "launch", "--ranks", "2", "--nnodes", nodes]
    command += ["--restarts", "3", "--rdzv_endpoint", f"{ADDRESS[meet_at]}:29500", "--", *OPTIONS.split()]
    return [*command, "--data.path", str(text), "--job.dump_folder", str(folder)]


def launch_with_own_disk(hosts: Hosts, host: str, text: Path, folder: Path) -> subprocess.Popen[str]:
    """Like `launch`, but with the parent of the run folder on a private disk of the host."""
    words = shlex.join(launch_command(text, folder))
    mounted = f"mount -t tmpfs none {shlex.quote(str(folder.parent))} && cd / && exec {words}"
    return hosts.start(host, ["unshare", "--mount", "sh", "-c", mounted])


def train(hosts: Hosts, text: Path, folder: Path) -> None:
    """Train undisturbed."""
    for process in [launch(hosts, host, text, folder) for host in HOSTS]:
        _, err = process.communicate()
        assert process.returncode == 0, err


def train_and_lose_a_host(hosts: Hosts, text: Path, folder: Path, step: int) -> str:
    """Train while the second host is lost in the middle of a step and comes back; returns the output of the first."""
    log = folder.with_suffix(".faults")
    # The step stalls on the host to be lost, so that the loss falls in the middle of the step.
    fault = {
        "SPURLINE_FAULTS": f"slow@backward:step={step},rank=2,attempt=0,seconds=600",
        "SPURLINE_FAULTS_LOG": str(log),
    }
    first, second = (launch(hosts, host, text, folder, **fault) for host in HOSTS)
    wait_until(lambda: (log.exists() and '"slow"' in log.read_text()) or first.poll() is not None)
    assert first.poll() is None, first.communicate()[1] + second.communicate()[1]
    hosts.unplug("b")
    hosts.kill("b")
    second.communicate()
    wait_until(lambda: (folder / "logs" / "errors.log").exists() or first.poll() is not None)  # the loss is noticed
    hosts.plug("b")
    again = launch(hosts, "b", text, folder)
    out, err = first.communicate()
    _, err_again = again.communicate()
    assert (first.returncode, again.returncode) == (0, 0), err + err_again
    return out + err


def train_and_lose_the_first_rank(hosts: Hosts, text: Path, folder: Path, step: int) -> str:
    """Train with a spare host, and lose the one with rank 0 for good; returns the output of the other."""
    log = folder.with_suffix(".faults")
    fault = {
        "SPURLINE_FAULTS": f"slow@backward:step={step},rank=0,attempt=0,seconds=600",
        "SPURLINE_FAULTS_LOG": str(log),
    }
    command = launch_command(text, folder, nodes="1:2", meet_at="b")
    first, second = (hosts.start(host, command, **fault) for host in HOSTS)  # ranks are in the order of addresses
    wait_until(lambda: (log.exists() and '"slow"' in log.read_text()) or second.poll() is not None)
    assert second.poll() is None, first.communicate()[1] + second.communicate()[1]
    hosts.kill("a")
    first.communicate()
    out, err = second.communicate()
    assert second.returncode == 0, out + err
    return out + err


def wait_until(happened: Callable[[], bool], seconds: float = 600) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen")
        time.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(description="Lose one of two hosts, and compare with a run that did not.")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="of the step in which it is lost")
    parser.add_argument("--folder", type=Path, help="where the two runs are kept (default: a temporary one)")
    options = parser.parse_args()
    if reason := why_not():
        print(f"two_hosts: {reason}", file=sys.stderr)
        return 2
    step = random.Random(options.seed).randrange(2, STEPS)
    with tempfile.TemporaryDirectory() as temporary, Hosts() as hosts:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        text = folder / "text"
        text.mkdir()
        write_words(text)
        train(hosts, text, folder / "undisturbed")
        print(train_and_lose_a_host(hosts, text, folder / "lost", step), end="")
        same = run_result(folder / "lost") == run_result(folder / "undisturbed")
        loss = run_result(folder / "lost").metrics[-1]["loss"]
    outcome = "same bytes as undisturbed" if same else "DIFFERENT from the undisturbed run"
    print(f"host b was lost in step {step} (seed {options.seed}): final loss {loss}, {outcome}")
    return 0 if same else 1


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
