"""The first hour on a GPU that nobody has timed: is it right, what are the open numbers, how good was the prediction.

Four parts, each of use by itself: every preset against the reference; probes of exp and of overlap; a kit of 24 configs
in 6 shapes, predicted best, middling and poor, discarded ones included; then an ordinary tune with what is left of the
budget. Every trial goes into the database, which can be merged with zyfa-db merge; the report says what changed against
the prediction. The same code runs on any GPU that the model knows.
"""

import dataclasses
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from zyfa.archs import default_config
from zyfa.config import AttentionConfig, AttentionKey
from zyfa.limits import broken_limit
from zyfa.recipes import PRESETS
from zyfa.tuning_db.schema import Toolchain
from zyfa.tuning_db.store import Store

from . import fitting
from .compile import Build
from .evidence import LEAST_NOISE, Landscape, Timed
from .facts import Facts
from .first_hour_probes import Found, Probe, found
from .gate import gate
from .model import DEVICES, Prediction, nominal_ms, predict
from .progress import cell_name
from .ranking import Score, score
from .rates import FITS, Fit
from .space import candidates, seeds
from .timing import Repeats
from .worker import Job, Result, WorkerPool

CHECK = Repeats(0.0, 1, 1, 0.0)  # of the self-test: the time is of no interest
KIT = Repeats(10.0, 5, 30, 40.0)
LIMIT_S = 120.0  # of one config, its compile included where the cache missed
MAX_ERROR = 2.0
SAMPLE = 48  # configs of a shape that are compiled and predicted, of which the kit takes 24
RECIPES = tuple(PRESETS[name] for name in ("balanced", "accurate", "fast"))  # of the kit's FP8 shapes
EACH = 8  # of the kit: predicted best, in between, and poor (grade C or discarded)
# What the kit fits: the numbers that no probe gives, and the overlap, which a probe only starts.
FITTED = (
    "overlap.0",
    "overlap.1",
    "overlap.2",
    "stall",
    "drain",
    "barrier",
    "overhead",
    "clock_fraction",
    "quantiser_fraction",
)


def kit_keys() -> list[AttentionKey]:
    """Six shapes that differ in what bounds them: grid fill, matrix work, exp, the masked tail, quantisers."""

    def at(dtype, seqlen, causal, head_dim=128):
        return AttentionKey(dtype, head_dim, head_dim, 32, 8, 1, seqlen, seqlen, causal)

    return [
        at("bf16", 1024, True), at("bf16", 4096, False), at("bf16", 8192, True),
        at("fp8", 2048, True), at("fp8", 8192, False), at("bf16", 4096, True, 64),
    ]  # fmt: skip


class Tried(NamedTuple):
    """One config of the kit: what was predicted, whether the gate would have discarded it, what was measured."""

    config: AttentionConfig
    facts: Facts
    predicted: Prediction
    discarded: str | None
    result: Result


class Shape(NamedTuple):
    """One shape of the kit. before, after: the order of the model as shipped, and fitted to the other shapes."""

    key: AttentionKey
    tried: tuple[Tried, ...]
    before: Score
    after: Score


class Outcome(NamedTuple):
    """All that the hour found; checks: preset and shape to result."""

    checks: dict[str, Result]
    probe: Probe | None
    probed: Found | None
    shapes: list[Shape]
    fits: dict[str, Fit]


class Hour:
    """The first three parts; tune() of the command does the fourth. stopped() is asked between trials."""

    def __init__(
        self, sku: str, arch: str, compile: Callable[[AttentionKey, AttentionConfig], "Future[Build]"],
        pool: WorkerPool, probe: Callable[[], Probe], store: Store | None, toolchain: Toolchain,
        say: Callable[[str], None] = print, stopped: Callable[[], bool] = lambda: False, seed: int = 0,
    ):  # fmt: skip
        self._device, self._arch, self._compile, self._pool = DEVICES[sku], arch, compile, pool
        self._probe, self._store, self._toolchain = probe, store, toolchain
        self._say, self._stopped, self._random = say, stopped, random.Random(seed)

    def run(self, checks: Sequence["Check"] | None = None, keys: Sequence[AttentionKey] | None = None) -> Outcome:
        """The outcome, cut short where stopped() says so; raises what a broken worker raises."""
        results = self.self_test(list(check_list(self._arch)) if checks is None else checks)
        probe, probed = self._probes()
        fits = {"shipped": FITS[self._arch]}
        if probed:
            fits["probed"] = probed.applied(fits["shipped"], self._device.clock_ghz)
        tried = [(key, kit) for key in keys or kit_keys() if not self._stopped() and (kit := self.kit(key))]
        shapes, fitted = self._judge(tried, fits.get("probed", fits["shipped"]))
        return Outcome(results, probe, probed, shapes, fits | ({"fitted": fitted} if fitted else {}))

    # --- correctness ---------------------------------------------------------------------------------------------

    def self_test(self, checks: Sequence["Check"]) -> dict[str, Result]:
        """Every preset and shape once against the reference."""
        self._say(f"self-test: {len(checks)} calls against the reference")
        builds = [self._compile(check.key, check.config) for check in checks]  # fills the cache that launches read
        results = {}
        for check, build in zip(checks, builds, strict=True):
            if self._stopped():
                break
            built = build.result()
            if built.facts is None:
                results[check.name] = Result("compile_failed", reason=built.failure or "")
            else:
                results[check.name] = self._timed(check.key, check.config, CHECK)
            if results[check.name].outcome != "ok":
                self._say(f"  {check.name}: {results[check.name].outcome} {results[check.name].reason}")
        right = sum(result.outcome == "ok" for result in results.values())
        self._say(f"  {right} of {len(results)} are right")
        return results

    def _timed(self, key: AttentionKey, config: AttentionConfig, repeats: Repeats) -> Result:
        gpu = self._pool.gpus[0]
        return self._pool.submit(gpu, Job(key, (config,), repeats, MAX_ERROR), LIMIT_S).result()[0]

    # --- probes --------------------------------------------------------------------------------------------------

    def _probes(self) -> tuple[Probe | None, Found | None]:
        if self._stopped():
            return None, None
        try:
            probe = self._probe()
            return probe, found(probe, self._arch)
        except (RuntimeError, ArithmeticError, LookupError) as error:  # a probe that fails leaves the rest of use
            self._say(f"probes: {type(error).__name__}: {error}")
            return None, None

    # --- the kit -------------------------------------------------------------------------------------------------

    def kit(self, key: AttentionKey) -> list[Tried]:
        """Up to 24 configs of one shape, compiled, predicted, timed and stored."""
        chosen = choose(self._predicted(key), EACH)
        self._say(f"kit: {cell_name(key)}: {len(chosen)} configs")
        tried = []
        for config, facts, prediction, reason in chosen:
            if self._stopped():
                break
            result = self._timed(key, config, KIT)
            self._log(key, config, facts, result)
            tried.append(Tried(config, facts, prediction, reason, result))
        return tried

    def _predicted(self, key: AttentionKey) -> list["Candidate"]:
        """A sample of the space, the seeds in it, that compiled to code with loops."""
        every = list(candidates(key, self._arch, RECIPES))
        configs = list(
            dict.fromkeys([*seeds(key, self._arch, RECIPES), *self._random.sample(every, min(SAMPLE, len(every)))])
        )
        builds = [(config, self._compile(key, config)) for config in configs[:SAMPLE]]
        known = []
        for config, build in builds:
            facts = build.result().facts
            if facts is not None and facts.loops:
                reason = gate(facts, key, config, self._arch)
                known.append(Candidate(config, facts, predict(facts, key, config, self._device), reason))
        return known

    def _log(self, key: AttentionKey, config: AttentionConfig, facts: Facts, r: Result) -> None:
        if self._store is not None:
            default = config == default_config(self._arch, key)
            self._store.add_trial(
                key, self._toolchain, config, outcome=r.outcome, trust="measured", ms=r.ms, ms_lo=r.ms_lo,
                ms_hi=r.ms_hi, samples=r.samples, rel_err=r.rel_err, is_default=default, reason=r.reason,
                facts=facts.to_dict(),
            )  # fmt: skip

    # --- what it says of the model -------------------------------------------------------------------------------

    def _judge(self, tried: Sequence[tuple[AttentionKey, list[Tried]]], start: Fit) -> tuple[list[Shape], Fit | None]:
        """Scores of every shape, before and after a fit to the other shapes; and the fit to all."""
        kits = {key: kit for key, kit in tried if sum(t.result.ms is not None for t in kit) > 1}
        landscapes = {key: self._landscape(key, kit) for key, kit in kits.items()}
        if len(landscapes) < 2:
            return [], None
        self._say("fitting the model's open numbers")
        halves = list(landscapes)[::2], list(landscapes)[1::2]
        by_half = [fitting.fit([landscapes[key] for key in half], start, FITTED) for half in halves]
        shapes = []
        for key, at in landscapes.items():
            other = by_half[0] if key in halves[1] else by_half[1]
            shapes.append(Shape(key, tuple(kits[key]), self._score(at, FITS[self._arch]), self._score(at, other)))
        return shapes, fitting.fit(list(landscapes.values()), start, FITTED)

    def _landscape(self, key: AttentionKey, kit: Sequence[Tried]) -> Landscape:
        timed = [(t, t.result) for t in kit if t.result.ms is not None]
        return Landscape(
            self._device.sku, key, tuple(Timed(t.config, t.facts, r.ms or 0.0, _noise(r)) for t, r in timed), {}
        )

    def _score(self, at: Landscape, fit: Fit) -> Score:
        return score(at.timed, [nominal_ms(t.facts, at.key, t.config, self._device, fit) for t in at.timed])


class Check(NamedTuple):
    """One call of the self-test."""

    name: str
    key: AttentionKey
    config: AttentionConfig


class Candidate(NamedTuple):
    config: AttentionConfig
    facts: Facts
    predicted: Prediction
    discarded: str | None


def check_list(arch: str) -> Iterator[Check]:
    """bf16, fp16 and every FP8 preset, with and without a mask, in three head dims, GQA and MHA."""
    names = {"bf16": ("bf16", "none"), "fp16": ("fp16", "none")} | {f"fp8:{n}": ("fp8", r) for n, r in PRESETS.items()}
    for name, (dtype, recipe) in names.items():
        for head_dim, nheads_k in ((64, 8), (128, 2), (256, 8)):
            for causal in (True, False):
                key = AttentionKey(dtype, head_dim, head_dim, 8, nheads_k, 2, 1000, 1000, causal)
                config = default_config(arch, key, recipe)
                while broken_limit(config, key, arch) and config.num_stages > 1:  # 16-bit K tiles are twice as large
                    config = dataclasses.replace(config, num_stages=config.num_stages - 1)
                mask = "causal" if causal else "full"
                yield Check(f"{name} {mask} d{head_dim} h8:{nheads_k}", key, config)


def choose(known: Sequence[Candidate], each: int) -> list[Candidate]:
    """`each` predicted best, as many evenly in between, and as many poor ones: discarded, then grade C, slowest last.

    Where a kind is short the others fill up.
    """
    good = sorted((c for c in known if not c.discarded), key=lambda c: c.predicted.ms)
    poor = [c for c in known if c.discarded] + [c for c in good[each:] if c.predicted.confidence == "C"]
    top, rest = good[:each], [c for c in good[each:] if c not in poor]
    poor = _evenly(poor, max(each, 3 * each - len(top) - len(rest)))
    middle = _evenly(rest, 3 * each - len(top) - len(poor))
    return [*top, *middle, *poor]


def _evenly(items: Sequence[Candidate], most: int) -> list[Candidate]:
    count = min(most, len(items))
    return [items[int(n * len(items) / count)] for n in range(count)]


def _noise(result: Result) -> float:
    assert result.ms is not None and result.ms_lo is not None and result.ms_hi is not None
    return max(LEAST_NOISE, (result.ms_hi - result.ms_lo) / 2 / result.ms)


def budget_left(begun: float, budget_s: float | None) -> float:
    """Seconds for the tune: of the budget, or of an hour; at least one minute."""
    return max(60.0, (budget_s or 3600.0) - (time.monotonic() - begun))
