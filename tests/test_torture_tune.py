"""scripts/torture_tune.py in small: kills of a tuning run and of its workers cost one trial of a GPU at most."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "torture_tune.py"


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL and flock")
def test_killed_runs_lose_one_trial_of_a_gpu_at_most_and_end_with_the_same_winners():
    command = [sys.executable, "-P", str(SCRIPT), "--moments", "8", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["coordinator_kills"] + found["worker_kills"] == 8 and found["coordinator_kills"] > 0
    assert found["most_lost"] <= 1 and found["faults"] == found["other_winners"] == 0
    assert len(found["winners"]) == 2
