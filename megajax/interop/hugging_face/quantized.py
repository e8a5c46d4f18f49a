"""Tensors of quantised checkpoints, dequantised to fp32 as their rows are read.

FP8 (`quant_method` fp8, of DeepSeek-V3, Qwen3 and Mistral): X.weight is float8, and X.weight_scale_inv has the factor of
each block of rows and columns, or one factor. The last blocks of a matrix may be smaller. transformers divides a matrix
evenly into as many blocks as there are factors, which is the same where the block's size divides the matrix's; where it does
not, its FP8 kernels and DeepSeek's use the block size of config.json, as this file does.

MXFP4 (`quant_method` mxfp4, of gpt-oss): X_blocks [..., groups, 16] has two e2m1 numbers in a byte, the low bits first, and
X_scales [..., groups] exponents of 2 plus 127. The tensor is [..., 32 groups]; that of experts has its last two axes,
outputs and inputs, exchanged, as in transformers.
"""

import dataclasses
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from megajax.config import ConfigError
from megajax.interop.hugging_face.keys import Keys, read_json
from megajax.interop.safetensors import EIGHT_BITS, StoredTensor, open_tensors
from megajax.schedules.errors import shown

__all__ = ["BlockScaled", "MicroScaled", "check_quantization", "dequantized", "open_weights"]

FP8, MXFP4 = "fp8", "mxfp4"
BLOCK = [128, 128]  # transformers' default of weight_block_size
SCALES = (".weight_scale_inv", ".scale", ".qscale_weight")  # as transformers knows the factors of X.weight
ACTIVATIONS = (".activation_scale", ".input_scale", ".qscale_act")  # of computing in FP8
E2M1 = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
REMEDY = {
    "gptq": "dequantise it with GPTQModel, or give the original model",
    "awq": "dequantise it with AutoAWQ, or give the original model",
    "bitsandbytes": "load it by transformers, call model.dequantize() and save_pretrained, or give the original model",
    "compressed-tensors": "decompress it with the library compressed-tensors, or give the original model",
}


@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """A matrix in float8, with a factor for each block.

    Attributes:
      weight: [rows, columns].
      scale: [blocks of rows, blocks of columns], or one element.
      block: rows and columns of a block.
    """

    weight: StoredTensor
    scale: StoredTensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole matrix."""
        return self.weight.shape

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop, fp32."""
        rows = self.weight.rows(start, stop).astype(np.float32)
        if math.prod(self.scale.shape) == 1:
            return rows * _factors(self.scale.rows(0, 1)).reshape(())
        high, wide = self.block
        first = start // high
        factors = _factors(self.scale.rows(first, -(-stop // high)))
        factors = factors.repeat(high, axis=0)[start - first * high :][: stop - start]
        return rows * factors.repeat(wide, axis=1)[:, : self.shape[1]]


@dataclasses.dataclass(frozen=True)
class MicroScaled:
    """A tensor in MXFP4.

    Attributes:
      blocks: [..., groups, 16], two numbers in a byte.
      scales: [..., groups], exponents.
    """

    blocks: StoredTensor
    scales: StoredTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        *outer, groups, size = self.blocks.shape
        shape = (*outer, groups * size * 2)
        return shape if len(shape) < 3 else (*shape[:-2], shape[-1], shape[-2])

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Elements start to stop of the first axis, fp32."""
        blocks = self.blocks.rows(start, stop)
        pairs = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(*blocks.shape[:-1], -1)
        rows = pairs * _factors(self.scales.rows(start, stop))[..., None]
        rows = rows.reshape(*rows.shape[:-2], -1)
        return rows if rows.ndim < 3 else rows.swapaxes(-1, -2)


def _factors(scales: np.ndarray) -> np.ndarray:
    """Factors in fp32; bytes are exponents of 2 plus 127."""
    return np.ldexp(np.float32(1), scales.astype(np.int32) - 127) if scales.dtype == np.uint8 else scales.astype("f4")


def check_quantization(keys: Keys) -> Mapping[str, Any]:
    """`quantization_config` of a config.json; empty: the weights are not quantised.

    Raises:
      ConfigError: they are, in a way that is not read.
    """
    config = keys.get("quantization_config", dict, None)
    if config is None:
        return {}
    method = config.get("quant_method") or next((name for name in config if name.startswith("load_in_")), None)
    if method not in (FP8, MXFP4):
        remedy = REMEDY.get(
            method, REMEDY["bitsandbytes"] if str(method).startswith("load_in") else "give the original one"
        )
        raise ConfigError(
            f"{keys.path}: weights that are quantised by {shown(method)} are not read, only {FP8} and {MXFP4}: {remedy}"
        )
    block = config.get("weight_block_size", BLOCK)
    legal = block is None or (
        isinstance(block, list) and len(block) == 2 and all(type(one) is int and one > 0 for one in block)
    )
    if not legal:
        raise ConfigError(f"{keys.path}: weight_block_size = {shown(block)} must be two sizes; correct the file")
    return config


def open_weights(directory: pathlib.Path) -> dict[str, Any]:
    """All tensors of a directory with config.json and safetensors, those that are quantised as dequantised ones.

    Raises:
      ConfigError: see `open_tensors` and `dequantized`.
    """
    path = directory / "config.json"
    return dequantized(open_tensors(directory), check_quantization(Keys(read_json(path), path)), directory)


def dequantized(
    tensors: Mapping[str, StoredTensor], config: Mapping[str, Any], directory: pathlib.Path
) -> dict[str, Any]:
    """The tensors by the names of what they stand for, without scales.

    Raises:
      ConfigError: a scale is missing, or has another shape.
    """
    method, found = config.get("quant_method"), dict(tensors)
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if method == FP8 and tensor.dtype in EIGHT_BITS and name.endswith(".weight"):
            scale = next((stem + end for end in SCALES if stem + end in tensors), None)
            if scale is None:
                raise ConfigError(f"{directory} has no scale of {name}, {stem}{SCALES[0]}: download it again")
            found[name] = _scaled(name, tensor, found.pop(scale), config.get("weight_block_size", BLOCK), directory)
        elif method == FP8 and name.endswith(ACTIVATIONS):
            del found[name]
        elif method == MXFP4 and name.endswith("_blocks"):
            stem = name.removesuffix("_blocks")
            scales = tensors.get(f"{stem}_scales")
            if (
                scales is None
                or scales.shape != tensor.shape[:-1]
                or {scales.dtype, tensor.dtype} != {np.dtype(np.uint8)}
            ):
                raise ConfigError(f"{directory}: {stem}_scales does not fit {name}: download it again")
            del found[name], found[f"{stem}_scales"]
            found[stem] = MicroScaled(tensor, scales)
    return found


def _scaled(name: str, weight: StoredTensor, scale: StoredTensor, block: list[int] | None, directory) -> BlockScaled:
    sizes, blocks = weight.shape, scale.shape
    if len(sizes) == 2 and math.prod(blocks) == 1:
        return BlockScaled(weight, scale, (1, 1))
    if len(sizes) == len(blocks) == 2 and all(blocks):
        if block and blocks == tuple(-(-size // one) for size, one in zip(sizes, block, strict=True)):
            return BlockScaled(weight, scale, tuple(block))
        if not any(
            size % count for size, count in zip(sizes, blocks, strict=True)
        ):  # of another size than config.json's
            return BlockScaled(weight, scale, tuple(size // count for size, count in zip(sizes, blocks, strict=True)))
    raise ConfigError(
        f"{directory}: the scale of {name} has shape {blocks}, which does not fit {sizes} in blocks of {block}"
    )
