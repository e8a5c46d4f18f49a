"""The layers of each stage as one writes them: `--pipeline-layout`, in the notation of Megatron-LM."""

import functools
import re
from typing import Any

from megajax.config.errors import ConfigError, either, one_of
from megajax.schedules.errors import shown

__all__ = ["check_pipeline_layout", "layers_of_stages"]

MOST = 20_000  # characters of a layout without repetitions
REPEATED = re.compile(r"(?:\(([^()]*)\)|([Et|L]))\*(\d{1,5})")
FORM = "write stages between |, such as 'E|t*8|(tt|)*2L' with E the embedding, t a layer and L the loss, or '0,8,2,2,0'"


@functools.lru_cache(maxsize=64)
def layers_of_stages(layout: str | None) -> tuple[int, ...] | None:
    """The layers of each stage by `pipeline_layout`, in the order of the model; None if it is None.

    Raises:
        ConfigError: it is no layout.
    """
    if layout is None:
        return None
    if re.fullmatch(r"\d{1,6}(,\d{1,6})*", layout):
        return tuple(map(int, layout.split(",")))
    given, text = f"pipeline_layout = {shown(layout)}", re.sub(r"[\s,]", "", layout)
    while match := REPEATED.search(text):
        part = (match[1] if match[1] is not None else match[2]) * min(int(match[3]), MOST)
        text = text[: match.start()] + part + text[match.end() :]
        if len(text) > MOST:
            raise ConfigError(f"{given} has more than {MOST} layers and stages.")
    if other := re.search(r"[^Et|L]", text):
        hint = " (modules of --mtp-num-layers are always on the last stage)" if other[0] == "m" else ""
        raise ConfigError(f"{given} has {shown(other[0])}{hint}: {FORM}.")
    if not (text.startswith("E") and text.endswith("L")) or text.count("E") + text.count("L") > 2:
        raise ConfigError(f"{given} must begin with E, end with L, and have both once: {FORM}.")
    return tuple(stage.count("t") for stage in text.split("|"))


def check_pipeline_layout(parallel: Any) -> None:
    """Checks a ParallelConfig: the layout has a stage for each chunk of each rank.

    Raises:
        ConfigError: it has not, or it is none.
    """
    counts = layers_of_stages(parallel.pipeline_layout)
    if counts is None:
        return
    pipe, chunks, given = parallel.pipe, parallel.chunks, f"pipeline_layout = {shown(parallel.pipeline_layout)}"
    if len(counts) != pipe * chunks:
        stages = [one_of("pipe", [len(counts) // chunks] if len(counts) % chunks == 0 else [], pipe)]
        stages += [one_of("chunks", [len(counts) // pipe] if len(counts) % pipe == 0 else [], chunks)]
        raise ConfigError(
            f"{given} has {len(counts)} stages, but pipe * chunks = {pipe} * {chunks}: pass "
            f"{either(*stages, 'another --pipeline-layout')}."
        )
    if any(count % parallel.recompute_blocks for count in counts):
        raise ConfigError(
            f"{given} has stages of {', '.join(map(str, counts))} layers, which recompute_blocks = "
            f"{parallel.recompute_blocks} does not divide: pass --recompute-blocks 1."
        )
