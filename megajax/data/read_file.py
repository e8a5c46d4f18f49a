"""Opens files of text: decompressed by their content, and refused in one line if they are of another format.

Every reader of text, JSON lines and tables comes through here. gzip, zstd, bzip2 and xz are recognised by their first bytes,
whatever the file is called. A pipe is read like a file, and so is a URL (`megajax.data.remote`).
"""

import bz2
import difflib
import gzip
import lzma
import os
import pathlib
import stat
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from megajax.config import ConfigError
from megajax.data.file_kinds import foreign, not_utf8
from megajax.data.remote import is_url, open_binary, remote_errors, size_of
from megajax.schedules.paths import hub_advice

__all__ = ["Part", "check_file", "check_place", "first_bytes", "is_compressed", "missing_pair"]
__all__ += ["read_parts", "read_range", "read_text"]

PART = 1 << 20  # bytes of content that are read at once
HEAD = 1 << 16  # bytes that a file is recognised by, if it has as many
COMPRESSIONS = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
ZSTD = b"\x28\xb5\x2f\xfd"
# Folders that other tools write, by a file in them, and what to do about it.
FOLDERS = {
    "dataset_dict.json": (
        "the splits of a dataset, written by save_to_disk",
        "`python -c \"from datasets import load_from_disk; load_from_disk({path!r})['train'].to_json({out!r})\"`",
    ),
    "dataset_info.json": (
        "a dataset, written by save_to_disk",
        '`python -c "from datasets import load_from_disk; load_from_disk({path!r}).to_json({out!r})"`',
    ),
    "config.toml": ("a run directory", ""),
    "config.json": ("a model's directory", ""),
}
SEVERAL = ("--input", "--sft-data", "--task-data", "--dev-data")  # options that take more than one file


class Part(NamedTuple):
    """Decompressed bytes, and the bytes of the (compressed) file read so far, 0 for a pipe."""

    content: bytes
    read: int


def read_parts(path: str, wanted: str, remedy: str, option: str = "") -> Iterator[Part]:
    """The content of a file in parts; an empty file has none.

    Args:
      path: the file.
      wanted: see `foreign`.
      remedy: the end of messages: "pass --input a readable file".
      option: the option that names the file, for messages about folders.

    Raises:
      ConfigError: it cannot be read, is damaged, is a folder or a device, or is of a format that is not read.
    """
    check_place(path, remedy, option)
    with remote_errors(path, remedy):
        try:
            with open_binary(path) as packed:
                head, known = b"", False
                for content in _unpacked(packed):
                    if not known:  # several parts, if a compressed file's are small
                        head += content
                        if len(head) < HEAD:
                            continue
                        _check_content(head, path, wanted)
                        content, head, known = head, b"", True
                    yield Part(content, packed.tell() if packed.seekable() else 0)
                if head:
                    _check_content(head, path, wanted)
                    yield Part(head, packed.tell() if packed.seekable() else 0)
        except (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile):
            raise ConfigError(
                f"cannot read {path}: the compressed file is truncated or damaged; {_complete(remedy)}"
            ) from None
        except OSError as error:
            if is_url(path):
                raise
            if error.errno is None:  # of bz2
                raise ConfigError(f"cannot read {path}: the compressed file is damaged; {_complete(remedy)}") from None
            raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from None


def read_range(path: str, start: int, stop: int, remedy: str) -> Iterator[Part]:
    """Bytes [start, stop) of a file or URL in parts, as they are; their `read` counts from `start`.

    Raises:
      ConfigError: it cannot be read, or is shorter.
    """
    done = start
    with remote_errors(path, remedy):
        try:
            with open_binary(path) as file:
                file.seek(start)
                while done < stop and (content := file.read(min(PART, stop - done))):
                    done += len(content)
                    yield Part(content, done - start)
        except OSError as error:
            if is_url(path):
                raise
            raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    if done < stop:
        raise ConfigError(f"cannot read {path}: it ends at byte {done:,}, and had {stop:,}; {remedy}")


def is_compressed(path: str, remedy: str) -> bool:
    """Whether a file or URL begins as a compressed one.

    Raises:
      ConfigError: it cannot be read.
    """
    check_place(path, remedy, "")
    with remote_errors(path, remedy):
        try:
            with open_binary(path) as packed:
                return packed.peek(8).startswith((ZSTD, *COMPRESSIONS))
        except OSError as error:
            if is_url(path):
                raise
            raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from None


def check_file(path: str, wanted: str, remedy: str, option: str = "") -> int:
    """Reads the beginning of a file; returns its size, 0 for a pipe, which is left alone.

    Raises:
      ConfigError: see `read_parts`.
    """
    check_place(path, remedy, option)
    if not (is_url(path) or os.path.isfile(path)):
        return 0
    next(read_parts(path, wanted, remedy, option), None)
    with remote_errors(path, remedy):
        return size_of(path)


def first_bytes(path: str) -> bytes:
    """The first bytes of a file after decompression, at least 512 if it has as many; none if they cannot be read."""
    try:
        with open(path, "rb") as packed:
            return next(_unpacked(packed), b"")
    except (OSError, EOFError, zlib.error, lzma.LZMAError):
        return b""


def read_text(path: str, wanted: str, remedy: str) -> str:
    """The text of a whole file, without its byte order mark.

    Raises:
      ConfigError: see `read_parts`; or it is not UTF-8, with the line.
    """
    content = b"".join(part.content for part in read_parts(path, wanted, remedy))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} line {line} is {not_utf8(error, path)}: {remedy}.") from None


def _check_content(head: bytes, path: str, wanted: str) -> None:
    if kind := foreign(head, path, wanted):
        raise ConfigError(f"{path} is {kind.what}: {kind.remedy}")


def missing_pair(prefix: str) -> str:
    """The end of a message about PREFIX.bin or PREFIX.idx, of which one is not there."""
    named = prefix.removesuffix(".bin").removesuffix(".idx")
    if named != prefix:
        return f": did you mean {named}?"
    there = [ending for ending in (".bin", ".idx") if os.path.isfile(prefix + ending)]
    if len(there) == 1:
        return f", and a pair has both files: copy or write {prefix} again"
    if os.path.isfile(prefix):
        command = f"python -m megajax.data.preprocess --input {prefix} --out PREFIX --tokenizer NAME"
        return f", and {prefix} is one file: make a pair of its text with `{command}`"
    if os.path.isdir(prefix):
        pairs = sorted(str(path.with_suffix("")) for path in pathlib.Path(prefix).glob("*.idx"))
        return f", and {prefix} is a directory: pass a pair's path without .bin and .idx" + (
            f", such as {pairs[0]}" if pairs else ""
        )
    return f"; pass the path without .bin and .idx{hub_advice(prefix) if '/' in prefix else ''}"


def _complete(remedy: str) -> str:
    return remedy.replace("a readable file", "a complete file")


def _unpacked(packed: BinaryIO) -> Iterator[bytes]:
    head = packed.peek(8)
    if head.startswith(ZSTD):
        yield from _unpacked_zst(packed)
        return
    opener = next((opener for magic, opener in COMPRESSIONS.items() if head.startswith(magic)), None)
    stream = opener(packed) if opener else packed
    while part := stream.read(PART):
        yield part


def _unpacked_zst(packed: BinaryIO) -> Iterator[bytes]:
    """Decompresses frame by frame: the library's stream reader reports no error for a truncated file."""
    import zstandard

    frame, rest = None, b""
    try:
        while packing := rest or packed.read(PART // 16):
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            if content := frame.decompress(packing):
                yield content
            rest = frame.unused_data
            frame = None if frame.eof else frame
    except zstandard.ZstdError as error:
        raise zlib.error(str(error)) from None
    if frame is not None:
        raise EOFError


def check_place(path: str, remedy: str, option: str) -> None:
    """Refuses what is neither a file nor a pipe; of a URL nothing."""
    if is_url(path):
        return
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}{_missing(path)}; {remedy}") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; {remedy}") from None
    if stat.S_ISDIR(mode):
        raise ConfigError(f"cannot read {path}: it is {_folder(path, option, remedy)}")
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        kind = "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise ConfigError(f"cannot read {path}: it is {kind}, not a file; {remedy}")


def _missing(path: str) -> str:
    """The end of a message about a file that does not exist: a similar one that does, if there is one."""
    if os.path.islink(path):
        return f", to which this symbolic link points: {os.readlink(path)}"
    if os.path.exists(f"{path}.bin") and os.path.exists(f"{path}.idx"):
        return f", but there is the pair {path}.bin and .idx: it is for --data-path {path}"
    folder = pathlib.Path(path).parent
    if not folder.is_dir():
        return f": there is no folder {folder} in {pathlib.Path.cwd()}" if not folder.is_absolute() else ""
    near = difflib.get_close_matches(pathlib.Path(path).name, os.listdir(folder), n=1, cutoff=0.6)
    return f" (did you mean {folder / near[0]}?)" if near else ""


def _folder(path: str, option: str, remedy: str) -> str:
    """The message about a folder in place of a file: its kind, and what to do."""
    out = f"{path.rstrip('/')}.jsonl"
    for name, (what, command) in FOLDERS.items():
        if os.path.exists(os.path.join(path, name)):
            made = command.format(path=path, out=out)
            return f"{what}; make JSON lines of it with {made}" if made else f"{what}; {remedy}"
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        return f"a directory, and cannot be listed: {error.strerror}; {remedy}"
    if not names:
        return f"an empty directory; {remedy}"
    endings = [pathlib.PurePath(name).suffix for name in names]
    files = os.path.join(path, f"*{max(endings, key=endings.count)}")
    if option in SEVERAL:
        return f"a directory; pass the files in it: {option} {files}"
    pair = f"python -m megajax.data.preprocess --input {files} --out PREFIX"
    several = f", or tokenize all of them with `{pair}` and pass --data-path PREFIX" if option == "--text" else ""
    return f"a directory; pass {option or 'the name of'} one file{several}"
