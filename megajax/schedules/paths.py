"""Paths that users pass, which are of this machine's file systems: names of object stores, URLs and hubs are refused.

The check is of the text alone: no file is opened. A field of the configuration has it by its `text_kind="path"`, an option
of another command by `type=local_path`. Where a place may also be in an object store that megajax reads and writes, gs:// or
s3://, it is `text_kind="store"` and `type=store_path`.
"""

import argparse
import os
import re
import sys

from megajax.schedules.arguments import plain_text
from megajax.schedules.errors import shown

__all__ = [
    *("hub_advice", "is_store", "local_path", "path_problem", "source_path", "source_problem"),
    *("named_store_path", "store_path", "store_problem", "tell_replaced", "without_secrets"),
]

COPIES = {  # what copies files of an object store or file system, by the scheme of its URLs
    ("s3", "s3a", "s3n", "r2", "minio", "swift", "cos", "oss", "oci", "tos", "obs"): "aws s3 sync",
    ("gs", "gcs"): "gcloud storage rsync",
    ("az", "azure", "abfs", "abfss", "wasb", "wasbs", "adl"): "azcopy sync",
    ("hdfs", "webhdfs", "viewfs", "dbfs"): "hdfs dfs -get",
}
STORES = {scheme: copy for schemes, copy in COPIES.items() for scheme in schemes}
HUBS = ("hf", "hub", "huggingface", "modelscope")
WEB = ("http", "https", "ftp", "sftp", "ssh", "scp", "rsync", "git")
# Of these schemes a mistyped URL is recognised too: s3:/bucket, hub:org/name.
KNOWN = (*STORES, *HUBS, *WEB, "file")
OWN_STORES = ("gs", "s3")  # that megajax reads and writes
OTHER_NAMES = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
NAMED = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*=(?=[A-Za-z])")  # the name of a validation set
SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/*)(.*)", re.DOTALL)
SIGNED = re.compile(
    r"[?&](x-(amz|goog)-(signature|credential|security-token)|awsaccesskeyid|signature|sig|token)=", re.I
)
HOST = re.compile(r"[\w.-]+@[\w.-]+:")


def path_problem(word: str) -> tuple[str, str] | None:
    """Why a word is no path of this machine, and what to pass in its place: the parts of a message. None: it is one.

    "NAME=PATH", a validation set, is checked as PATH.
    """
    word = NAMED.sub("", word, count=1)
    if re.match(r"~[\w-]*(/|$)", word) or re.match(r"\$(\w|\{)", word):
        return "was not expanded by a shell, and would be a folder of that name", f"{_expanded(word)}, the whole path"
    if HOST.match(word):
        return "is on another host, which megajax does not read or write", "a path of this machine (rsync copies it)"
    found = SCHEME.fullmatch(word)
    if found is None:
        return None
    scheme, slashes, rest = found[1].lower(), found[2], found[3]
    if scheme not in KNOWN and len(slashes) < 2:
        return None  # a file whose name has a colon
    if scheme == "file":
        return "is a URL", f"the path alone, /{rest.removeprefix('localhost/')}"
    if scheme in STORES:
        where = "a path of this machine, also a mounted one"
        return (
            "is in an object store or a remote file system, which is not read or written here",
            f"{where} ({STORES[scheme]} copies it)",
        )
    if scheme in HUBS or re.match(r"(www\.)?(huggingface\.co|hf\.co)/", rest):
        return (
            "is a URL of a hub",
            f"the name alone, ORG/NAME of a model, or a local directory ({_download(rest)} makes it)",
        )
    return (
        "is a URL, and megajax reads and writes none",
        f"a path of this machine (curl -L -O {shown(word)} downloads it)",
    )


def local_path(word: str) -> str:
    """A reader of paths, for `type` of an option."""
    if problem := path_problem(plain_text(word)):
        raise argparse.ArgumentTypeError(f"{shown(word)} {problem[0]}: pass {problem[1]}")
    return word


def source_problem(word: str) -> tuple[str, str] | None:
    """As `path_problem`, of a source of data: a path, a URL (SCHEME://...) or hub:ORG/NAME."""
    if word.lower().startswith("hub:"):
        named = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", word[4:].strip("/"))
        return None if named else ("is no name of a dataset on the Hub", "hub:ORG/NAME")
    found = SCHEME.fullmatch(word)
    if not found or len(found[2]) < 2 or found[1].lower() in ("ssh", "scp", "rsync", "git"):
        return path_problem(word)
    if "@" in found[3].partition("/")[0]:
        found_by = "the libraries of fsspec find credentials in the environment or in their own files"
        return "names a user before its host", f"the URL without them ({found_by})"
    if SIGNED.search(found[3]):
        return "has a signature in its query, which would be logged", "the URL of a store that is read with credentials"
    return None if found[3].strip("/") else ("names no file", "a whole URL")


def source_path(word: str) -> str:
    """A reader of sources of data, for `type` of an option; see `source_problem`."""
    if problem := source_problem(plain_text(word)):
        raise argparse.ArgumentTypeError(f"{without_secrets(word)} {problem[0]}: pass {problem[1]}")
    if word.lower().startswith("hub:"):
        return "hub:" + word[4:].strip("/")
    found = SCHEME.fullmatch(word)
    if found and len(found[2]) >= 2:
        rest, scheme = found[3], found[1].lower()
        return "/" + rest.removeprefix("localhost/") if scheme == "file" else f"{scheme}://{rest}"
    return word


def is_store(place: str | os.PathLike[str]) -> bool:
    """Whether a place is in an object store that megajax reads and writes: gs://BUCKET/... or s3://BUCKET/..."""
    return str(place).startswith(tuple(f"{scheme}://" for scheme in OWN_STORES))


def store_problem(word: str) -> tuple[str, str] | None:
    """As `path_problem`, of a place that may also be a folder of an object store, gs://BUCKET/FOLDER or s3://BUCKET/FOLDER."""
    found = SCHEME.fullmatch(word)
    scheme = found[1].lower() if found else ""
    name = OTHER_NAMES.get(scheme, scheme)
    if name not in OWN_STORES:
        problem = path_problem(word)
        if problem and scheme in STORES:
            return "is in a store that megajax does not read or write", f"{problem[1]}, gs:// or s3://"
        return problem
    bucket, _, folder = found[3].partition("/")
    if "@" in bucket or re.search("[?#]", found[3]):
        where = "the libraries of the store find credentials in the environment or in their own files"
        return "has credentials or a query in it, which would be logged", f"{name}://BUCKET/FOLDER alone ({where})"
    if len(found[2]) > 2:
        bucket = ""
    elif not is_store(word) or found[2] != "//":
        return "is no name of a place in an object store", f"{name}://{found[3].strip('/') or 'BUCKET/FOLDER'}"
    if not BUCKET.fullmatch(bucket):
        return "names no bucket" if not bucket else "is not the name of a bucket", f"{name}://BUCKET/FOLDER"
    parts = folder.rstrip("/").split("/")
    if any(part in ("", ".", "..") for part in parts) or re.search(r"[*\[\]\\\s]", folder):
        return "names no folder in its bucket", f"{name}://{bucket}/FOLDER"
    return None


def store_path(word: str) -> str:
    """A reader of places, for `type` of an option; see `store_problem`."""
    if problem := store_problem(plain_text(word)):
        raise argparse.ArgumentTypeError(f"{without_secrets(word)} {problem[0]}: pass {problem[1]}")
    return word.rstrip("/") if is_store(word) else word


def named_store_path(word: str) -> str:
    """As `store_path`, of a word that may be the weight of a blend, or NAME=PLACE."""
    name = NAMED.match(word)
    return name[0] + store_path(word[name.end() :]) if name else store_path(word)


def without_secrets(word: str) -> str:
    """The word as a message shows it, of a URL without its user, password and query."""
    if not SCHEME.fullmatch(word):
        return shown(word)
    return shown(re.sub(r"[?#].*", "?...", re.sub(r"(:/*)[^/]*@", r"\1...@", word, count=1), flags=re.DOTALL))


def hub_advice(name: str) -> str:
    """The end of a message about a directory that is not there, if its name may be one of the Hugging Face Hub; else ""."""
    if os.path.exists(name) or not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", name):
        return ""
    return f" If {name} is a name on the Hugging Face Hub, run `{_download(name)}` and pass that directory."


def _download(name: str) -> str:
    """The command that copies a repository of the Hub into a directory of its own name."""
    parts = re.sub(r"^(www\.)?(huggingface\.co|hf\.co)/", "", name).split("/")
    kinds = {"datasets": " --repo-type dataset", "spaces": " --repo-type space"}
    kind, parts = (kinds[parts[0]], parts[1:]) if parts[0] in kinds else ("", parts)
    repository = "/".join(parts[:2])
    return f"hf download {repository}{kind} --local-dir {parts[-1] if len(parts) < 2 else parts[1]}"


def _expanded(word: str) -> str:
    """The path that a shell would make of it, if it can be told; else the word."""
    return os.path.expanduser(os.path.expandvars(word))


def tell_replaced(path: str | os.PathLike[str]) -> None:
    """Says on stderr that a file which is about to be written is there already: nothing is lost without a word."""
    if os.path.isfile(path):
        print(f"note: {os.fspath(path)} was there, and is replaced", file=sys.stderr)
