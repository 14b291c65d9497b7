"""A config that hangs, one that faults and one that is wrong cost themselves and nothing else in a tuning run."""

import pytest
from fake_landscape import DEFAULT, FakeFarm, Silent, make_tools
from planted import PLANTED, OnCpu, on_gpu

from zyfa.device import current_device, device_of_sku
from zyfa.tuner import coordinator
from zyfa.tuner.cells import Setup
from zyfa.tuner.coordinator import Coordinator
from zyfa.tuner.effort import EFFORTS, Effort
from zyfa.tuner.plan import grid
from zyfa.tuner.timing import Repeats
from zyfa.tuner.worker import WorkerPool
from zyfa.tuning_db.reader import read
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

TOOLS = Toolchain("hash", "3.7.1", "2.13", "580")
LIMIT_S = 4.0


def campaign(path, device, cells, effort, tools, make):
    """Tunes with planted configs among the seeds; returns (runs, trials shown, whether the worker was replaced)."""
    setup = Setup("measure", TOOLS, effort, lookahead=6)
    display, pool = Silent(), WorkerPool((0,), device.arch, make)
    try:
        with Store(path, device) as store:
            runs = Coordinator(cells, setup, tools, store, display, pool=pool).run()
    finally:
        pool.close()
    return runs, [(config, result) for _, config, result in display.trials]


def check(path, runs, trials):
    """Each planted config has its outcome once in each cell that met it, the run went on, and no row uses one."""
    with Store(path) as store:
        stored = store.trials()
    for config, outcome in PLANTED.items():
        assert [t.outcome for t in stored if t.config == config] == [outcome]
        assert all(t.reason and t.ms is None for t in stored if t.config == config)
    after = max(i for i, (config, _) in enumerate(trials) if config in PLANTED)
    assert any(result.outcome == "ok" for _, result in trials[after:])
    assert all(run.state == "done" and run.winner[0] not in PLANTED for run in runs)
    assert not {row.config for row in read(path)} & set(PLANTED)
    assert len(read(path)) == len(runs)


def test_planted_configs_cost_themselves_only(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator, "TRIAL_LIMIT_S", LIMIT_S)
    cells = grid([256], ("bf16",), (32,), ((4, 2),), (1,), (True,))
    path, effort = tmp_path / "db.sqlite", Effort(9, 9, 2, Repeats(), Repeats())
    tools = make_tools(FakeFarm(), seeds=(DEFAULT, *PLANTED))._replace(seeds=lambda key: [DEFAULT, *PLANTED])
    runs, trials = campaign(path, device_of_sku("h200"), cells, effort, tools, OnCpu)
    check(path, runs, trials)
    more = Effort(14, 14, 2, Repeats(), Repeats())
    _, again = campaign(path, device_of_sku("h200"), cells, more, tools, OnCpu)
    assert again and not {config for config, _ in again} & set(PLANTED)


@pytest.mark.gpu
def test_planted_configs_on_a_gpu(tmp_path, monkeypatch):
    from zyfa.tuner import space
    from zyfa.tuner.compile import CompileFarm
    from zyfa.tuner.gate import gate
    from zyfa.tuner.study import Space

    monkeypatch.setattr(coordinator, "TRIAL_LIMIT_S", 2 * LIMIT_S)
    device = current_device(0)
    cells = grid([1024], ("bf16",), (128,), ((32, 8),), (1,), (True,))
    path = tmp_path / "db.sqlite"
    with CompileFarm(device.arch, 4, share_head_groups=False) as farm:
        tools = make_tools(farm)._replace(
            space=lambda key: Space.of(key, device.arch),
            seeds=lambda key: [space.seeds(key, device.arch)[0], *PLANTED],
            gate=lambda facts, key, config: None if config in PLANTED else gate(facts, key, config, device.arch),
            predict=None,
        )
        effort = Effort(10, 10, 2, EFFORTS["quick"].repeats, EFFORTS["quick"].final)
        runs, trials = campaign(path, device, cells, effort, tools, on_gpu)
    check(path, runs, trials)
