"""What the first hour found, as lines for people and as one JSON object to send back."""

import dataclasses
import statistics
from collections.abc import Iterator

from .first_hour import Outcome, Shape, Tried
from .progress import cell_name
from .rates import Fit

FAST = 5  # of a shape: what the gate must not discard


def lines(outcome: Outcome, sku: str) -> Iterator[str]:
    """The report: correctness, open numbers, each shape against its prediction, and the gate."""
    wrong = {name: r for name, r in outcome.checks.items() if r.outcome != "ok"}
    yield f"{sku}: {len(outcome.checks) - len(wrong)} of {len(outcome.checks)} calls of the self-test are right"
    yield from (f"  {name}: {r.outcome} {r.reason}" for name, r in wrong.items())
    yield from _numbers(outcome)
    yield from (line for shape in outcome.shapes for line in _shape(shape))
    yield from _summary(outcome)


def _numbers(outcome: Outcome) -> Iterator[str]:
    if outcome.probed:
        found = outcome.probed
        overlap = ", ".join(f"{x:.2f}" for x in found.overlap)
        yield f"exp takes {found.exp:.2f} slots; matrix and vector work overlap by {overlap} with 1, 2, 3 waves a SIMD"
        yield f"clock while multiplying {found.clock_ghz:.2f} GHz; a launch takes {1e3 * found.launch_ms:.2f} us"
    shipped, fitted = outcome.fits["shipped"], outcome.fits.get("fitted")
    if fitted:
        yield "numbers of the model, shipped -> fitted to the kit:"
        yield from (f"  {name}: {old} -> {new}" for name, old, new in changes(shipped, fitted))


def changes(old: Fit, new: Fit) -> Iterator[tuple[str, object, object]]:
    """(field, before, after) of what differs."""
    for name, before, after in zip(Fit._fields, old, new, strict=True):
        if before != after:
            yield name, before, after


def _shape(shape: Shape) -> Iterator[str]:
    timed = [t for t in shape.tried if t.result.ms is not None]
    first = min(timed, key=lambda t: (t.discarded is not None, t.predicted.ms))
    best = min(timed, key=_ms)
    yield f"{cell_name(shape.key)}: {len(timed)} of {len(shape.tried)} configs timed"
    yield (
        f"  predicted best: {first.predicted.ms:.4g} ms ({first.predicted.ms_lo:.4g} to {first.predicted.ms_hi:.4g}), "
        f"measured {_ms(first):.4g} ms, {_ms(first) / _ms(best) - 1:.1%} above the best of the kit"
    )
    yield f"  measured best: {_ms(best):.4g} ms, predicted {best.predicted.ms:.4g} ms: {best.config}"
    yield (
        f"  order: tau {shape.before.tau:.2f} as shipped, {shape.after.tau:.2f} fitted to other shapes; "
        f"regret of the first five {shape.before.top5:.1%} and {shape.after.top5:.1%}"
    )


def _ms(tried: Tried) -> float:
    assert tried.result.ms is not None
    return tried.result.ms


def _summary(outcome: Outcome) -> Iterator[str]:
    if not outcome.shapes:
        yield "no shape has two timed configs: nothing can be said of the model"
        return
    for which in ("before", "after"):
        scores = [getattr(shape, which) for shape in outcome.shapes]
        tau, top5 = statistics.median(s.tau for s in scores), statistics.median(s.top5 for s in scores)
        name = "as shipped" if which == "before" else "fitted, held out"
        yield f"model {name}: tau {tau:.2f}, regret of the first five {top5:.1%} (medians of {len(scores)} shapes)"
    lost, of = discarded_fast(outcome)
    yield f"gate: would have discarded {lost} of the {of} fastest configs"


def discarded_fast(outcome: Outcome) -> tuple[int, int]:
    """(discarded, all) among the FAST fastest configs of each shape."""
    fastest = [
        tried for shape in outcome.shapes
        for tried in sorted((t for t in shape.tried if t.result.ms is not None), key=_ms)[:FAST]
    ]  # fmt: skip
    return sum(tried.discarded is not None for tried in fastest), len(fastest)


def to_dict(outcome: Outcome, head: dict) -> dict:
    """Everything as plain values, for the file that is sent back."""
    return head | {
        "checks": {name: [r.outcome, r.rel_err, r.reason] for name, r in outcome.checks.items()},
        "probe": outcome.probe and outcome.probe._asdict(),
        "probed": outcome.probed and outcome.probed._asdict(),
        "fits": {name: fit._asdict() for name, fit in outcome.fits.items()},
        "shapes": [
            {"key": shape.key._asdict(), "before": shape.before._asdict(), "after": shape.after._asdict(),
             "tried": [_tried(tried) for tried in shape.tried]}
            for shape in outcome.shapes
        ],
        "gate": dict(zip(("discarded", "fastest"), discarded_fast(outcome), strict=True)),
    }  # fmt: skip


def _tried(tried: Tried) -> dict:
    return {
        "config": tried.config.to_dict(), "outcome": tried.result.outcome, "ms": tried.result.ms,
        "predicted_ms": tried.predicted.ms, "interval": [tried.predicted.ms_lo, tried.predicted.ms_hi],
        "grade": tried.predicted.confidence, "discarded": tried.discarded, "facts": dataclasses.asdict(tried.facts),
    }  # fmt: skip
