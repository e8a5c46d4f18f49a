"""Code that a run directory names: only one's own is imported without a word.

The configuration of a run names the Python files that it imports (`--import`), and whoever reads the run directory runs
them. So a run signs their names with a key of the user's account, in RUN_DIR/.imports. Of a directory without the
signature, from another account or a download, they are imported with `--trust` only.
"""

import hashlib
import hmac
import json
import os
import pathlib
import secrets
from collections.abc import Mapping, Sequence

from megajax.config.errors import ConfigError
from megajax.schedules.errors import shown

__all__ = ["require_trust", "sign_imports"]

SIGNATURE = ".imports"  # in the run directory


def _key_file(environment: Mapping[str, str]) -> pathlib.Path:
    state = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return pathlib.Path(state) / "megajax" / "key"


def _key(environment: Mapping[str, str], make: bool) -> bytes | None:
    """The account's key; None if there is none, or it cannot be made."""
    path = _key_file(environment)
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f"{path.name}.{os.getpid()}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32))
            try:
                os.link(temporary, path)  # another process may have been faster
            except FileExistsError:
                pass
            temporary.unlink()
        found = path.read_bytes().strip()
        return found if len(found) >= 32 and path.stat().st_uid == os.getuid() else None
    except OSError:
        return None


def _signature(key: bytes, imports: Sequence[str]) -> str:
    return hmac.new(key, json.dumps(list(imports)).encode(), hashlib.sha256).hexdigest()


def sign_imports(directory: pathlib.Path, imports: Sequence[str], environment: Mapping[str, str]) -> None:
    """Notes in a run directory that its imports are this account's. Without a key nothing is written.

    Args:
      imports: as the directory's config.toml has them.
    """
    if imports and (key := _key(environment, make=True)):
        (directory / SIGNATURE).write_text(_signature(key, imports))


def require_trust(config: str, imports: Sequence[str], given: Sequence[str], environment: Mapping[str, str]) -> None:
    """Raises ConfigError if a configuration in a run directory names code to import that is not this account's.

    Args:
      config: the configuration's file. One that is in no run directory is a file of the user's.
      imports: as it has them.
      given: names that the command line imports too.
    """
    directory = pathlib.Path(config).absolute().parent
    if not imports or not (directory / "checkpoints").is_dir() or set(imports) <= set(given):
        return
    key = _key(environment, make=False)
    try:
        signed = (directory / SIGNATURE).read_text()[:1000]
    except (OSError, ValueError):
        signed = ""
    if key is None or not hmac.compare_digest(signed.encode(), _signature(key, imports).encode()):
        raise ConfigError(
            f"the configuration {config} runs code, {shown(', '.join(imports))}, and this account has not written it: look "
            "at it, and pass --trust, or --import with each of these names"
        )
