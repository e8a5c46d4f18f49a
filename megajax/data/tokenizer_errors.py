"""Errors of tokenizers' libraries as one line: they raise Exception itself, and panics of Rust."""

import contextlib
import os
import tempfile
from collections.abc import Iterator

from megajax.config import ConfigError

__all__ = ["library_errors", "panics_hidden"]


@contextlib.contextmanager
def library_errors(message: str) -> Iterator[None]:
    """Raises ConfigError with `message` and the reason if a tokenizer's library fails."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # Exception, RuntimeError and others; a Rust panic is a BaseException
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{message}: {reason}; pass another --tokenizer") from None


@contextlib.contextmanager
def panics_hidden() -> Iterator[None]:
    """Withholds standard error if a ConfigError is raised: a Rust panic writes a backtrace there."""
    with tempfile.TemporaryFile() as held:
        original = os.dup(2)
        os.dup2(held.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            os.dup2(original, 2)
            os.close(original)
            held.seek(0)
            if not failed:
                os.write(2, held.read())
