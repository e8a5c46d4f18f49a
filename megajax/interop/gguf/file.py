"""GGUF files (llama.cpp's), read through the library `gguf`: their metadata, and tensors under the names of transformers.

Quantised tensors are dequantised to fp32 by the library, a range of rows at a time. What llama.cpp stores otherwise than
transformers is undone here: the rows of Llama's queries and keys, which are interleaved for its rotary embedding, and
GPT-2's matrices, which are transposed.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.schedules.errors import shown

__all__ = ["GGUFFile", "GGUFTensor", "open_gguf"]

# Parts of the tensors' names: llama.cpp's -> transformers'. "{}" is the layer.
LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.{}.attn_norm": "model.layers.{}.input_layernorm",
    "blk.{}.attn_q": "model.layers.{}.self_attn.q_proj",
    "blk.{}.attn_k": "model.layers.{}.self_attn.k_proj",
    "blk.{}.attn_v": "model.layers.{}.self_attn.v_proj",
    "blk.{}.attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "blk.{}.attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "blk.{}.attn_output": "model.layers.{}.self_attn.o_proj",
    "blk.{}.ffn_norm": "model.layers.{}.post_attention_layernorm",
    "blk.{}.ffn_gate": "model.layers.{}.mlp.gate_proj",
    "blk.{}.ffn_up": "model.layers.{}.mlp.up_proj",
    "blk.{}.ffn_down": "model.layers.{}.mlp.down_proj",
}
GPT2_NAMES = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.{}.attn_norm": "transformer.h.{}.ln_1",
    "blk.{}.attn_qkv": "transformer.h.{}.attn.c_attn",
    "blk.{}.attn_output": "transformer.h.{}.attn.c_proj",
    "blk.{}.ffn_norm": "transformer.h.{}.ln_2",
    "blk.{}.ffn_up": "transformer.h.{}.mlp.c_fc",
    "blk.{}.ffn_down": "transformer.h.{}.mlp.c_proj",
}
NAMES = {"llama": LLAMA_NAMES, "qwen2": LLAMA_NAMES, "qwen3": LLAMA_NAMES, "gpt2": GPT2_NAMES}
INTERLEAVED = {"llama": ("q_proj", "k_proj")}
TRANSPOSED = {"gpt2": ("c_attn", "c_proj", "c_fc")}
ROTARY_FACTORS = "rope_freqs.weight"  # divisors of the frequencies: the scaling of Llama 3, not a parameter


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor in a file, as transformers shapes it.

    Attributes:
      name: in the file.
      shape: of the whole tensor.
      stored: the library's tensor, whose `data` is mapped memory [rows, bytes or elements of a row].
      head: elements of a head whose rows are interleaved; None: they are not.
      transposed: whether the file has the columns as rows.
    """

    name: str
    shape: tuple[int, ...]
    stored: Any
    head: int | None = None
    transposed: bool = False

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis, fp32; of interleaved tensors whole heads only."""
        if self.transposed:
            return self._dequantised(self.stored.data)[:, start:stop].T
        rows = self._dequantised(self.stored.data[start:stop])
        if self.head is None:
            return rows
        assert start % self.head == stop % self.head == 0, "a part of a head"
        # The file's element 2 i + j of a head is element j d/2 + i of transformers'.
        pairs = rows.reshape(-1, self.head // 2, 2, *self.shape[1:])
        return pairs.swapaxes(1, 2).reshape(rows.shape)

    def _dequantised(self, data: np.ndarray) -> np.ndarray:
        return _library(self.name).dequantize(np.ascontiguousarray(data), self.stored.tensor_type)


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An open file.

    Attributes:
      path: the file.
      metadata: its keys and values; arrays are lists.
      architecture: llama.cpp's name of the architecture.
      tensors: by transformers' names; those that it does not have keep the file's.
      rotary_factors: divisors of the rotary frequencies, fp32 [d / 2]; None: there are none.
    """

    path: pathlib.Path
    metadata: Mapping[str, Any]
    architecture: str
    tensors: Mapping[str, GGUFTensor]
    rotary_factors: np.ndarray | None


def open_gguf(path: pathlib.Path) -> GGUFFile:
    """Reads the metadata, and where the tensors are.

    Raises:
      ConfigError: the library is missing; the file cannot be read, is truncated or damaged, one part of several, of an
        architecture that megajax does not have, or quantised in a way that the library cannot undo.
    """
    library = _library(path)
    try:
        path.open("rb").close()
        with np.errstate(all="ignore"):
            reader = library.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give a GGUF file or a directory") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, RecursionError) as error:
        reason = "arrays in arrays" if isinstance(error, RecursionError) else error
        raise ConfigError(
            f"{path} is truncated, damaged, not GGUF or newer than the library gguf ({reason}): download it again, or pip "
            "install -U gguf"
        ) from None
    if reader.byte_order != "I":
        raise ConfigError(f"{path} is big-endian: convert it with gguf-convert-endian, which the library gguf has")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ConfigError(f"{path} is one of {metadata['split.count']} parts: merge them with llama-gguf-split --merge")
    architecture = metadata.get("general.architecture")
    if architecture not in NAMES:
        known = ", ".join(NAMES)
        raise ConfigError(f"{path}: the architecture {shown(architecture)} is not supported: give a model of {known}")
    heads = metadata.get(f"{architecture}.attention.head_count")
    tensors, factors = {}, None
    for stored in reader.tensors:
        _check_quantisation(path, library, stored)
        if stored.name == ROTARY_FACTORS:
            factors = library.dequantize(np.ascontiguousarray(stored.data), stored.tensor_type)
            continue
        name = _name(architecture, stored.name)
        tensors[name] = _tensor(path, architecture, name, stored, metadata, heads)
    return GGUFFile(path, metadata, architecture, tensors, factors)


def _library(what: Any) -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f"reading {what} needs the library gguf ({error}): pip install 'megajax[gguf]'") from None
    return gguf


def _check_quantisation(path: pathlib.Path, library: ModuleType, stored: Any) -> None:
    """Raises ConfigError if the library cannot dequantise the tensor."""
    data = stored.data if stored.data.ndim == 1 else stored.data[:1]
    try:
        library.dequantize(np.ascontiguousarray(data), stored.tensor_type)
    except NotImplementedError:
        raise ConfigError(
            f"{path}: {stored.name} is quantised as {stored.tensor_type.name}, which the library gguf does not dequantise: "
            "give a file of another quantisation, such as Q8_0"
        ) from None


def _name(architecture: str, name: str) -> str:
    """transformers' name of the file's tensor; its own if there is none."""
    stem, _, kind = name.rpartition(".")
    found = re.fullmatch(r"blk\.(\d+)\.(.*)", stem)
    layer, stem = (found[1], f"blk.{{}}.{found[2]}") if found else ("", stem)
    theirs = NAMES[architecture].get(stem)
    return f"{theirs.format(layer)}.{kind}" if theirs and kind in ("weight", "bias") else name


def _tensor(path: pathlib.Path, architecture: str, name: str, stored: Any, metadata, heads: Any) -> GGUFTensor:
    shape = tuple(int(size) for size in reversed(stored.shape))
    if name.endswith(tuple(f".{part}.weight" for part in TRANSPOSED.get(architecture, ()))):
        return GGUFTensor(stored.name, shape[::-1], stored, transposed=True)
    if not any(f".{part}." in name for part in INTERLEAVED.get(architecture, ())):
        return GGUFTensor(stored.name, shape, stored)
    if type(heads) is int and heads > 0 and ".k_proj." in name:
        heads = metadata.get(f"{architecture}.attention.head_count_kv", heads)
    if type(heads) is not int or heads < 1 or shape[0] % (2 * heads):
        raise ConfigError(f"{path}: {stored.name} has {shape[0]} rows for {shown(heads)} heads; download it again")
    return GGUFTensor(stored.name, shape, stored, head=shape[0] // heads)
