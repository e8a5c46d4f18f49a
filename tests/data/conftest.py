"""Fixtures of the tests of data."""

import pytest

from megajax.data import tokenize_blocks


@pytest.fixture
def tokenized_here(monkeypatch):
    """Preprocessing tokenizes in this process, without a pool of its own."""
    monkeypatch.setattr(tokenize_blocks.Workers, "__enter__", lambda workers: workers)
    monkeypatch.setattr(
        tokenize_blocks.Workers,
        "encode",
        lambda _, blocks, recipe: (tokenize_blocks.encode_block(one, recipe) for one in blocks),
    )
