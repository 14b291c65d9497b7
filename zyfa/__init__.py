"""Fast, accurate FP8/BF16 prefill attention whose tuning is searched once, remembered, and shipped per GPU."""

import sys
from typing import TYPE_CHECKING

from . import recipes
from .config import AttentionConfig, AttentionKey
from .errors import ConfigError, DatabaseError, SchemaTooNew, ZyfaError

if TYPE_CHECKING:
    from .interface import attention, explain

__all__ = [
    "AttentionConfig",
    "AttentionKey",
    "ConfigError",
    "DatabaseError",
    "SchemaTooNew",
    "ZyfaError",
    "attention",
    "explain",
    "recipes",
]
__version__ = "0.1.0"


def __getattr__(name: str):
    """attention and explain on first use: torch takes a second to import, which databases and tools need not pay."""
    if name in ("attention", "explain"):
        from . import interface

        globals().update(attention=interface.attention, explain=interface.explain)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if "torch" in sys.modules:  # whoever has torch may look for torch.ops.zyfa.attention, which interface registers
    from . import interface as _interface  # noqa: F401
