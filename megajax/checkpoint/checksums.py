"""Sums of a directory's files, so that a file that was cut short, lost or changed is found and named.

Each process sums what it wrote itself; process 0 adds the files that belong to none, and the other sums. A checkpoint of
terabytes is so summed by all hosts at once, and again by all of them before it is read.
"""

import json
import pathlib
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

DIRECTORY = "digests"
BLOCK = 1 << 24  # bytes read at once


def _sum(path: pathlib.Path) -> list[int]:
    """[bytes, CRC-32] of a file."""
    size = crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def _sums(root: pathlib.Path, files: Iterable[pathlib.Path]) -> dict[str, list[int]]:
    files = sorted(files)
    with ThreadPoolExecutor() as pool:
        return {str(file.relative_to(root)): value for file, value in zip(files, pool.map(_sum, files), strict=True)}


def _write(root: pathlib.Path, name: str, sums: dict[str, list[int]]) -> None:
    (root / DIRECTORY).mkdir(exist_ok=True)
    (root / DIRECTORY / f"{name}.json").write_text(json.dumps(sums, indent=0))


def write_own(root: pathlib.Path, process: int) -> None:
    """Sums the files that `process` wrote into a checkpoint."""
    own = [file for part in root.glob(f"**/ocdbt.process_{process}") for file in part.rglob("*") if file.is_file()]
    _write(root, f"process_{process}", _sums(root, own))


def write_rest(root: pathlib.Path) -> None:
    """Sums the files that no process has summed, and the sums."""
    known = {name for file in (root / DIRECTORY).glob("*.json") for name in json.loads(file.read_text())}
    files = [file for file in root.rglob("*") if file.is_file()]
    _write(root, "rest", _sums(root, [file for file in files if str(file.relative_to(root)) not in known]))


def problems(root: pathlib.Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with a directory: one line for each file that is missing, too short or long, or changed.

    Args:
      share: (which, of how many): the part of the files to look at.
    """
    which, of = share
    try:
        rest = _read(root, "rest")
        summed = [name for name in rest if pathlib.Path(name).parts[0] == DIRECTORY]
        # A list of sums that is damaged itself is found below; until then it is worth nothing.
        found = _compare(root, {name: rest[name] for name in summed})
        if found:
            return found
        sums = rest | {name: value for file in summed for name, value in json.loads((root / file).read_text()).items()}
    except (OSError, ValueError) as error:
        return [f"{DIRECTORY}/rest.json: {getattr(error, 'strerror', None) or error}"]
    return _compare(root, {name: sums[name] for name in sorted(sums)[which::of]})


def _read(root: pathlib.Path, name: str) -> dict[str, list[int]]:
    return json.loads((root / DIRECTORY / f"{name}.json").read_text())


def _compare(root: pathlib.Path, sums: dict[str, list[int]]) -> list[str]:
    def check(name: str) -> str | None:
        wanted, path = sums[name], root / name
        try:
            size = path.stat().st_size
            if size != wanted[0]:
                return f"{name}: {size:,} bytes, but {wanted[0]:,} were written"
            return None if _sum(path) == wanted else f"{name}: its content has changed since it was written"
        except FileNotFoundError:
            return f"{name}: missing"
        except OSError as error:
            return f"{name}: {error.strerror}"

    with ThreadPoolExecutor() as pool:
        return [problem for problem in pool.map(check, sums) if problem]
