"""The soak test's own rules: faults that can be told apart, and no success with fewer than were asked for."""

import json
import random
from types import SimpleNamespace

from spurline.testing import soak
from spurline.testing.faults import Fault


def test_each_attempt_has_one_fault_that_ends_it_and_steps_increase():
    for seed in range(50):
        faults = soak.plan_job(random.Random(seed), 12)
        fatal = [fault for fault in faults if fault.kind != "slow"]
        assert [fault.attempt for fault in fatal] == list(range(len(fatal)))
        steps = [fault.step for fault in fatal if fault.step]
        assert steps == sorted(set(steps))
        assert [fault for fault in fatal if (fault.kind, fault.point) in soak.FAULTS_AT_THE_END] == fatal[-1:]
        for fault in faults:
            parsed = Fault.parse(fault.text)
            assert (parsed.attempt, parsed.kind) == fault.noted_as


def test_fewer_faults_or_runs_than_were_asked_for_are_a_failure(tmp_path, monkeypatch, capsys):
    def run(self, name, faults, *options, ranks=4):
        (self.folder / name).mkdir()
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(soak.Soak, "run", run)
    monkeypatch.setattr(soak.Soak, "result", lambda self, name: {})
    monkeypatch.setattr(soak.Soak, "judge", lambda *args: [])
    assert soak.soak_faults(30, 60, 0, tmp_path / "a", 2, []) == 0
    assert soak.soak_faults(30, -1, 0, tmp_path / "b", 2, []) == 1
    assert "only 0 of 30 faults" in capsys.readouterr().out
    assert soak.soak_runs(3, 60, tmp_path / "c", []) == 0
    assert soak.soak_runs(3, -1, tmp_path / "d", []) == 1
    assert "only 0 of 3 runs" in capsys.readouterr().out


def test_fault_that_is_named_late_or_not_at_all_is_a_problem(tmp_path, monkeypatch):
    job = soak.Soak(tmp_path / "soak", [])
    fault = soak.Planned("stop", "backward", 5, 2, 0)
    logs = job.folder / "job" / "logs"
    logs.mkdir(parents=True)
    monkeypatch.setattr(soak.Soak, "result", lambda self, name: {})
    done = SimpleNamespace(returncode=0, stderr="")

    def problems(seconds, line):
        happened = soak._time_of("2026-01-01 00:00:00")
        (job.folder / "job" / "faults.jsonl").write_text(json.dumps({"time": happened, "attempt": 0, "kind": "stop"}))
        (logs / "errors.log").write_text(f"2026-01-01 00:00:{seconds:02} attempt 0: {line}\n")
        return job.judge("job", [fault], {}, done)

    assert problems(9, "step 5: rank 2 has been silent for 8 s") == []
    assert job.slowest == 9
    assert problems(50, "step 5: rank 2 has been silent for 8 s") == [f"{fault.text}: was named after 50 s"]
    assert "was not said" in problems(9, "step 5: rank 1 has been silent for 8 s")[0]
