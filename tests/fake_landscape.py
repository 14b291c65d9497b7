"""A small search space with a known optimum, and tools that answer from it: what the search tests run on."""

import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product

from zyfa.config import AttentionConfig, AttentionKey
from zyfa.tuner.cells import Tools
from zyfa.tuner.study import Space

VALUES = {
    "BLOCK_M": (16, 32, 64, 128, 256),
    "BLOCK_N": (16, 32, 64, 128),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}
DEFAULT = AttentionConfig(64, 64, 4, 2)
KEY = AttentionKey("bf16", 128, 128, 32, 8, 1, 1024, 1024, True)
BEST = AttentionConfig(128, 32, 8, 3)


@dataclass
class FakeFacts:
    code: str

    def to_dict(self):
        return asdict(self)


@dataclass
class FakeBuild:
    facts: FakeFacts | None
    failure: str | None = None
    seconds: float = 0.0


@dataclass
class FakePrediction:
    ms: float
    confidence: str = "B"

    @property
    def ms_lo(self):
        return 0.9 * self.ms

    @property
    def ms_hi(self):
        return 1.1 * self.ms


def time_of(key: AttentionKey, config: AttentionConfig) -> float:
    """Convex in the exponents, least at BEST: 1 ms times the length in k."""
    steps = sum(abs(math.log2(getattr(config, n) / getattr(BEST, n))) for n in ("BLOCK_M", "BLOCK_N", "num_warps"))
    return (1 + 0.3 * steps + 0.1 * abs(config.num_stages - BEST.num_stages)) * key.seqlen_k / 1024


def broken_rule(config: AttentionConfig) -> str | None:
    return "a warp owns at least 16 rows" if 16 * config.num_warps > config.BLOCK_M else None


def candidates() -> list[AttentionConfig]:
    return [c for values in product(*VALUES.values()) if broken_rule(c := AttentionConfig(*values)) is None]


def make_space(rule=broken_rule, key=KEY) -> Space:
    def suggest(trial):
        return AttentionConfig(**{name: trial.suggest_categorical(name, values) for name, values in VALUES.items()})

    return Space(key, suggest, rule, candidates)


class Silent:
    """A display that only remembers."""

    def __init__(self):
        self.trials = []

    def trial(self, run, config, result):
        self.trials.append((run.key, config, result))

    def state(self, run):
        pass

    def tick(self):
        pass


class FakeFarm:
    """Builds everything but a few configs, after `seconds`; counts what it was asked for."""

    def __init__(self, seconds: float = 0.0):
        self._seconds, self._threads = seconds, ThreadPoolExecutor(2)
        self._futures: dict[AttentionConfig, Future] = {}
        self.asked: list[AttentionConfig] = []

    def submit(self, key, config) -> Future:
        if config not in self._futures:
            self.asked.append(config)
            self._futures[config] = self._threads.submit(self._build, config)
        return self._futures[config]

    def _build(self, config):
        time.sleep(self._seconds)
        if config.num_stages == 4 and config.BLOCK_N == 128:
            return FakeBuild(None, "MLIRError: does not fit")
        if config.num_stages == 4 and config.BLOCK_N == 64:
            return FakeBuild(None, "compiler crashed (exit code -6)")
        return FakeBuild(FakeFacts("spills" if config.BLOCK_M * config.BLOCK_N > 16384 else "fine"))


def make_tools(farm: FakeFarm, gate=None, seeds=(DEFAULT,)) -> Tools:
    def spills(facts, key, config):
        return "spills: 9 registers" if facts.code == "spills" else None

    return Tools(
        space=lambda key: make_space(key=key),
        seeds=lambda key: list(seeds),
        compile=farm.submit,
        gate=gate or spills,
        predict=lambda facts, key, config: FakePrediction(time_of(key, config)),
    )
