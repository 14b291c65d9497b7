"""The errors that callers may want to catch; everything else is a ValueError or TypeError naming its argument."""


class ZyfaError(Exception):
    """Root of ZYFA's own errors."""


class ConfigError(ZyfaError, ValueError):
    """A configuration that has unknown fields, wrong types or impossible values."""


class DatabaseError(ZyfaError):
    """A tuning database that cannot be used; the message says which file and why."""


class SchemaTooNew(DatabaseError):
    """The database was written by a newer ZYFA: writers must refuse it, the runtime skips it."""
