"""SIGINT and SIGTERM end a run in order; a second one ends it at once."""

import os
import signal
import time

SAME_SIGNAL_S = 0.5  # `timeout` sends its signal twice, to the process and to its group


class Stop:
    """Remembers the first SIGINT or SIGTERM; a later one ends the process at once."""

    def __init__(self):
        self.signum = 0
        self._at = 0.0
        self.at_once = lambda: None

    def __enter__(self) -> "Stop":
        self._before = {s: signal.signal(s, self._handle) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *exc) -> None:
        if self.signum:
            return  # the process is about to end, and a late signal must not print a traceback
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame) -> None:
        now = time.monotonic()
        if not self.signum:
            self.signum, self._at = signum, now
        elif now - self._at > SAME_SIGNAL_S:
            self.at_once()
            os._exit(128 + signum)

    def requested(self) -> bool:
        return self.signum != 0
