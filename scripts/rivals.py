"""Runs other tuners over recorded tables; started by replay_search.py in an interpreter that has them, without ZYFA.

Reads {"which", "tables": [{"name", "fields": {field: value of each config}, "ms": [...]}], "seeds", "trials"}, prints
[[strategy, table, [index of each config in the order of first evaluation]], ...]. Failed configs (ms null) count as
trials: whoever asks for one has to time it to know.
"""

import contextlib
import json
import random
import sys
import tempfile
from pathlib import Path

KERNEL_TUNER = (
    "bayes_opt", "genetic_algorithm", "greedy_ils", "simulated_annealing", "diff_evo", "pso", "firefly_algorithm",
)  # fmt: skip
SMAC_TRIALS, SMAC_SEEDS, SMAC_ASKS = 50, 5, 400  # 0.1 to 0.5 s an ask
OPTUNA_ASKS = 600  # most points of the box of all fields are illegal, and an ask goes through all before it
BAD_MS = 1e9


def coded(table: dict) -> tuple[dict[str, list[int]], dict[tuple[int, ...], int]]:
    """(positions of the sorted values of each field, index of a config by its positions)."""
    values = {name: sorted(set(column)) for name, column in table["fields"].items()}
    rows = zip(*([values[n].index(v) for v in column] for n, column in table["fields"].items()), strict=True)
    return {name: list(range(len(v))) for name, v in values.items()}, {row: i for i, row in enumerate(rows)}


def kernel_tuner(table: dict, seeds: int, trials: int):
    """Its simulation mode over a cache file; restrictions tell it which configs are legal."""
    import kernel_tuner as kt
    import numpy as np

    params, index = coded(table)

    def legal(p):  # no lambda: those are parsed as text
        return tuple(p[name] for name in params) in index

    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.json"
        lines = {}
        for row, i in index.items():
            ms = table["ms"][i]
            extra = {k: 0.0 for k in ("compile_time", "verification_time", "benchmark_time", "strategy_time")}
            # a failed config is one whose run failed: it has to be evaluated to be known
            lines[",".join(map(str, row))] = dict(zip(params, row, strict=True)) | extra | {
                "time": "RuntimeFailedConfig" if ms is None else ms, "times": [ms or 0.0], "framework_time": 0.0,
                "timestamp": "",
            } | ({"__error__": "RuntimeFailedConfig"} if ms is None else {})  # fmt: skip
        head = {
            "device_name": "recorded", "kernel_name": "attention", "problem_size": [1, 1], "tune_params": params,
            "tune_params_keys": list(params), "objective": "time", "cache": lines,
        }  # fmt: skip
        cache.write_text(json.dumps(head))
        for strategy in KERNEL_TUNER:
            for seed in range(seeds):
                random.seed(seed)
                np.random.seed(seed)
                with contextlib.redirect_stdout(sys.stderr):
                    results, _ = kt.tune_kernel(
                        "attention", "", (1, 1), [], params, strategy=strategy, cache=str(cache), simulation_mode=True,
                        restrictions=legal, lang="C", quiet=True,
                        strategy_options={"max_fevals": min(trials, len(index))},
                    )  # fmt: skip
                rows = (tuple(result[name] for name in params) for result in results if result)
                yield (
                    f"kernel tuner {strategy}",
                    table["name"],
                    list(dict.fromkeys(index[r] for r in rows if r in index)),
                )


def smac(table: dict, seeds: int, trials: int):
    """SMAC's facade for hyperparameters, asked and told; illegal and known points are answered and cost no trial."""
    from ConfigSpace import ConfigurationSpace, OrdinalHyperparameter
    from smac import HyperparameterOptimizationFacade as Facade
    from smac import Scenario
    from smac.runhistory.dataclasses import TrialValue

    params, index = coded(table)
    for seed in range(min(seeds, SMAC_SEEDS)):
        configs = ConfigurationSpace(seed=seed)
        configs.add([OrdinalHyperparameter(name, values) for name, values in params.items()])
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            scenario = Scenario(
                configs, n_trials=SMAC_ASKS, seed=seed, deterministic=True, output_directory=Path(folder)
            )
            facade = Facade(scenario, lambda config, seed=0: 0.0, overwrite=True, logging_level=40)
            order: dict[int, None] = {}
            for _ in range(SMAC_ASKS):
                info = facade.ask()
                at = index.get(tuple(info.config[name] for name in params))
                ms = None if at is None else table["ms"][at]
                facade.tell(info, TrialValue(cost=BAD_MS if ms is None else ms, time=0.0))
                if at is not None:
                    order[at] = None
                if len(order) >= min(trials, SMAC_TRIALS):
                    break
        yield "smac", table["name"], list(order)


def optuna_coded(table: dict, seeds: int, trials: int):
    """Optuna's samplers that know no categories, over the positions of the values; else as SMAC."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    params, index = coded(table)
    samplers = {"cmaes": optuna.samplers.CmaEsSampler, "qmc": optuna.samplers.QMCSampler}
    for name, make in samplers.items():
        for seed in range(seeds):
            study = optuna.create_study(sampler=make(seed=seed, warn_independent_sampling=False))
            order: dict[int, None] = {}
            for _ in range(OPTUNA_ASKS):
                trial = study.ask()
                at = index.get(tuple(trial.suggest_int(field, 0, len(v) - 1) for field, v in params.items()))
                ms = None if at is None else table["ms"][at]
                study.tell(trial, BAD_MS if ms is None else ms)
                if at is not None:
                    order[at] = None
                if len(order) >= min(trials, len(index)):
                    break
            yield f"optuna {name}", table["name"], list(order)


RIVALS = {"kernel_tuner": kernel_tuner, "smac": smac, "optuna": optuna_coded}


def main() -> None:
    given = json.loads(Path(sys.argv[1]).read_text())
    run = RIVALS[given["which"]]
    found = [row for table in given["tables"] for row in run(table, given["seeds"], given["trials"])]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
