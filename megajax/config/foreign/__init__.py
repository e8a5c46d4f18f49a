"""Options of other tools by their names there, with the options here that do the same: plain data.

docs/coming_from.md prints the tables. Names match without regard to case, `-` and `_`. All names were looked up
in the tools' sources of summer 2026; names of older versions are kept.
"""

from megajax.config.foreign.commands import OF_COMMANDS
from megajax.config.foreign.common import COMMON
from megajax.config.foreign.deepspeed import DEEPSPEED
from megajax.config.foreign.entry import Entry
from megajax.config.foreign.hugging_face import HUGGING_FACE
from megajax.config.foreign.megatron import MEGATRON
from megajax.config.foreign.nanogpt import NANOGPT
from megajax.config.foreign.torchtitan import TORCHTITAN

__all__ = ["COMMON", "OF_COMMANDS", "TOOLS", "Entry"]

TOOLS: dict[str, dict[str, Entry]] = {
    "nanoGPT": NANOGPT,
    "Megatron-LM": MEGATRON,
    "Hugging Face": HUGGING_FACE,
    "torchtitan": TORCHTITAN,
    "DeepSpeed": DEEPSPEED,
}
