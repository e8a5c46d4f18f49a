"""Files in SQuAD's format for tests."""

import json
import pathlib


def question(name: str, text: str, *answers: tuple[str, int], **more) -> dict:
    """A question with answers (text, offset)."""
    found = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": text, "answers": found} | more


def write_squad(path: pathlib.Path, paragraphs: list[tuple[str, list[dict]]], version: str = "1.1") -> str:
    """Writes paragraphs (context, questions), each an article of its own; returns the path."""
    data = [{"title": "x", "paragraphs": [{"context": context, "qas": asked}]} for context, asked in paragraphs]
    path.write_text(json.dumps({"version": version, "data": data}), encoding="utf-8")
    return str(path)
