"""tensorstore's drivers of object stores for orbax, which itself knows gs:// alone (orbax-checkpoint 0.12.8).

orbax names the driver and the path of its arrays in three functions of one module. They are replaced for the process when
the first checkpoint in an object store is written or read; what they return for a directory of this machine stays the same.

The small files of orbax are opened by etils.epath, with gcsfs or s3fs. Writing them is replaced too, by one request of
`object_store.write`. gcsfs sends two for each file, of which the second one fails when it is repeated after a lost answer;
and an upload that fails leaves a view of a BytesIO in a reference cycle, whose collection crashes Python 3.12.0 and 3.12.1
(https://github.com/python/cpython/issues/111049).
"""

import functools
import io
import os
import re
from collections.abc import Callable
from typing import Any

from megajax.checkpoint.object_store import Path, is_remote, place, write
from megajax.config import ConfigError
from megajax.schedules.paths import is_store

# About 45 s in all: a save to a store that is away ends with one line, and the next one tries again.
RETRIES = {"max_retries": 8, "initial_delay": "500ms", "max_delay": "10s"}
NAMES = ("_use_gcs_driver", "_normalize_path", "gcs_utils")  # of orbax's module


def orbax_path(path: Path) -> Any:
    """The path as orbax takes it.

    Raises:
      ConfigError: this version of orbax cannot be given a driver.
    """
    if not is_remote(path):
        return path
    from etils import epath

    _prepare()
    return epath.Path(str(path))


@functools.cache
def _prepare() -> None:
    from etils.epath import backend as etils_backend
    from orbax.checkpoint._src.serialization import tensorstore_utils as orbax_utils

    if missing := [name for name in NAMES if not hasattr(orbax_utils, name)]:
        raise ConfigError(
            f"this version of orbax has no {missing[0]}, and cannot write to object stores: pip install 'megajax[stores]'"
        )
    orbax_utils._use_gcs_driver = is_store
    orbax_utils._normalize_path = _normalized
    orbax_utils.gcs_utils = _Replaced(orbax_utils.gcs_utils, get_kvstore_for_gcs=kvstore)
    files = etils_backend.fsspec_backend
    files.open = functools.partial(_open, files.open)
    os.environ.setdefault("EPATH_USE_TF", "false")  # else etils.epath uses TensorFlow's files wherever it is installed
    # A connection without a byte for so long is closed, and the request sent again.
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS", "30")
    os.environ.setdefault("TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES", "1")


def _normalized(path: str) -> str:
    return re.sub(r"^(gs|s3):/+", r"\1://", os.path.normpath(path))


def _open(original: Callable[[Any, str], Any], path: Any, mode: str) -> Any:
    """A file of etils.epath: of a store, one that is written whole."""
    where = os.fspath(path)
    if "w" not in mode or not is_store(where):
        return original(path, mode)
    file = _Whole(place(where))
    return file if "b" in mode else io.TextIOWrapper(file, encoding="utf-8")


class _Whole(io.BytesIO):
    """A file whose object is written when it is closed. Raises OSError of the store."""

    def __init__(self, path: Path):
        super().__init__()
        self._path = path

    def close(self) -> None:
        if not self.closed:
            content = self.getvalue()
            super().close()
            write(self._path, content)


class _Replaced:
    """A module with some of its attributes replaced."""

    def __init__(self, original: Any, **replaced: Any):
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def kvstore(url: str) -> dict[str, Any]:
    """The specification of tensorstore's driver for a folder, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."""
    scheme, _, rest = str(url).partition("://")
    bucket, _, folder = rest.partition("/")
    where = {"bucket": bucket, "path": folder}
    if scheme == "gs":
        driver = os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs")  # orbax's variable
        return {"driver": driver, **where} | ({"gcs_request_retries": RETRIES} if driver == "gcs" else {})
    return {"driver": "s3", **where, "s3_request_retries": RETRIES, **_s3_settings()}


@functools.cache
def _s3_settings() -> dict[str, Any]:
    """Endpoint, region and kind of credentials, as s3fs has found them: tensorstore does not read AWS_ENDPOINT_URL."""
    import fsspec

    system = fsspec.filesystem("s3")
    system.connect()
    about = system.s3.meta
    found: dict[str, Any] = {}
    if not re.search(r"\.amazonaws\.com(\.cn)?$", about.endpoint_url):
        found |= {"endpoint": about.endpoint_url, "aws_region": about.region_name or "us-east-1"}
    if system.anon:
        found["aws_credentials"] = {"type": "anonymous"}
    elif "AWS_ACCESS_KEY_ID" in os.environ:
        found["aws_credentials"] = {"type": "environment"}
    return found
