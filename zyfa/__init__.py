"""Fast, accurate FP8/BF16 prefill attention whose tuning is searched once, remembered, and shipped per GPU."""

import sys
from typing import TYPE_CHECKING

from . import recipes
from .config import AttentionConfig, AttentionKey
from .errors import ConfigError, DatabaseError, SchemaTooNew, ZyfaError

if TYPE_CHECKING:
    from .interface import attention, explain
    from .plan import plan_precision
    from .prepared import prepare

__all__ = [
    "AttentionConfig",
    "AttentionKey",
    "ConfigError",
    "DatabaseError",
    "SchemaTooNew",
    "ZyfaError",
    "attention",
    "explain",
    "plan_precision",
    "prepare",
    "recipes",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    """attention and what needs torch too on first use: torch takes a second to import, which databases need not pay."""
    if name in ("attention", "explain"):
        from . import interface

        globals().update(attention=interface.attention, explain=interface.explain)
        return globals()[name]
    if name == "plan_precision":
        from .plan import plan_precision

        return plan_precision
    if name == "prepare":
        from .prepared import prepare

        return prepare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "torch" in sys.modules:  # whoever has torch may look for torch.ops.zyfa.attention, which interface registers
    from . import interface as _interface  # noqa: F401
