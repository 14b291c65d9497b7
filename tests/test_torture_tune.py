"""scripts/torture_tune.py in small: kills of a tuning run and of its workers cost one trial of a GPU at most."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "torture_tune.py"


# Its forked runs can inherit a lock that nobody holds any more, and then hang: no part of every test run.
@pytest.mark.skipif("ZYFA_TORTURE" not in os.environ, reason="set ZYFA_TORTURE=1 to kill tuning runs, for minutes")
@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their parent by prctl")
def test_killed_runs_lose_one_trial_of_a_gpu_at_most_and_end_with_the_same_winners():
    done = subprocess.run([sys.executable, str(SCRIPT), "--moments", "10"], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["coordinator_kills"] + found["worker_kills"] >= 10 and found["coordinator_kills"] > 0
    assert found["most_lost"] <= 1 and found["faults"] == found["other_winners"] == 0
    assert found["slowest_resume_s"] < 2 and len(found["winners"]) == 2
