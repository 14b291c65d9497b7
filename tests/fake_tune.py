"""zyfa-tune with the compiler and the model replaced by fake_landscape: a process that tests can stop."""

import sys

from fake_landscape import FakeFarm, make_tools

from zyfa.tuner import session
from zyfa.tuner.cli import main

if __name__ == "__main__":
    farm = FakeFarm(0.3)
    session._tools = lambda device, method, lazy, axis: make_tools(farm)
    print("loaded", file=sys.stderr, flush=True)
    main()
