"""The presets behind --effort: the single source of how long a cell is searched and how long a config is timed."""

from dataclasses import dataclass

from .timing import Repeats


@dataclass(frozen=True)
class Effort:
    """trials: configs of a cell; patience: configs without a gain that end it earlier; finalists: the fastest, to be
    compared side by side with the default config. With a GPU it is also what bounds the wall time: a trial takes
    0.1 to 0.3 s there, and 16 cores compile four configs a second.
    """

    trials: int
    patience: int
    finalists: int
    repeats: Repeats
    final: Repeats


EFFORTS = {
    "quick": Effort(12, 10, 2, Repeats(5.0, 3, 15, 20.0), Repeats(0.0, 7, 21, 100.0)),
    "default": Effort(48, 24, 3, Repeats(10.0, 5, 30, 40.0), Repeats(0.0, 11, 41, 250.0)),
    "max": Effort(160, 64, 5, Repeats(20.0, 7, 60, 150.0), Repeats(0.0, 21, 101, 1000.0)),
}
