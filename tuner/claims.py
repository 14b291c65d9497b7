"""What may be said of predictions, and on what evidence: printed wherever something is predicted."""

from typing import NamedTuple


class Claim(NamedTuple):
    """Held-out figures of one model version; tests hold them to the file that scripts/validate_model.py wrote.

    kind: "rank" where every limit of that script was kept, else "prune": only what the gate discards is then claimed.
    discarded: of the five fastest configs of each call, how many the gate would have thrown away, of how many.
    """

    model_version: str
    source: str
    kind: str
    landscapes: int
    configs: int
    tau: float
    top5_regret: float
    top5_regret_p90: float
    discarded: tuple[int, int]


CLAIM = Claim("v2", "benchmarks/h200/model.json", "prune", 28, 906, 0.74, 0.0, 0.006, (0, 140))
TIMED_ARCHS = ("sm90",)  # where landscapes were timed; elsewhere the method is carried over and nothing is proven


def claim_of(arch: str, claim: Claim = CLAIM) -> str:
    """One or two sentences for people who are about to read predictions for this architecture."""
    lost, of = claim.discarded
    gate = f"its gate discarded {lost} of the {of} fastest configs"
    if claim.kind == "prune":
        order = f"its order (Kendall's tau {claim.tau:.2f}) did not beat the nearest measured length's in everything"
        untimed = f". Nothing has been timed on {arch}: zyfa-tune --first-hour does that"
        told = f"model {claim.model_version}: on an H200 {gate}, only that pruning is claimed, as {order}"
        return told + ("" if arch in TIMED_ARCHS else untimed)
    figures = (
        f"on an H200, {claim.landscapes} cells held out, its five first hold a config within "
        f"{claim.top5_regret_p90:.1%} of the best in 9 of 10 cells (Kendall's tau {claim.tau:.2f}); {gate}"
    )
    if arch in TIMED_ARCHS:
        return f"model {claim.model_version} ranks: {figures}"
    return (
        f"model {claim.model_version}: {figures}. Nothing has been timed on {arch}: there its order is unproven, and "
        "zyfa-tune --first-hour measures how good it is"
    )
