"""Every quantisation that the library gguf dequantises, of random blocks, through our reader: as the library, and with torch
as transformers dequantises, whole and in parts.
"""

import numpy as np
import pytest

from megajax.interop.gguf.file import open_gguf

gguf = pytest.importorskip("gguf")
from gguf.quants import _type_traits  # noqa: E402 (after the library is found)

KINDS = sorted(kind.name for kind in _type_traits)
ROWS, COLUMNS = 64, 512  # the file's tensors; two heads of 32 interleaved rows
TENSORS = {"blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight", "output.weight": "lm_head.weight"}


def written(path, name: str) -> dict[str, np.ndarray]:
    """A file with two tensors of random blocks; scales of fp16 are finite because their largest exponent is cleared."""
    kind = gguf.GGMLQuantizationType[name]
    size = gguf.GGML_QUANT_SIZES[kind]
    draw = np.random.default_rng(KINDS.index(name))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(2)
    arrays = {}
    for tensor in TENSORS:
        data = draw.integers(0, 256, (ROWS, COLUMNS // size[0] * size[1]), np.uint8) & 0xBF
        if name == "BF16":
            data = data & 0x3F
        arrays[tensor] = data
        writer.add_tensor(tensor, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return arrays


def in_order(whole: np.ndarray, name: str) -> np.ndarray:
    """The rows as transformers has them: those of a head are interleaved in the file."""
    return whole.reshape(2, 16, 2, COLUMNS).swapaxes(1, 2).reshape(ROWS, COLUMNS) if "attn_q" in name else whole


@pytest.mark.parametrize("name", KINDS)
def test_rows_are_the_librarys(name, tmp_path):
    arrays = written(tmp_path / "x.gguf", name)
    found = open_gguf(tmp_path / "x.gguf").tensors
    for tensor, data in arrays.items():
        wanted = in_order(gguf.dequantize(data, gguf.GGMLQuantizationType[name]), tensor)
        rows = found[TENSORS[tensor]]
        assert rows.shape == (ROWS, COLUMNS) and np.isfinite(wanted).all()
        np.testing.assert_array_equal(rows.rows(0, ROWS), wanted)
        np.testing.assert_array_equal(np.concatenate([rows.rows(at, at + 32) for at in (0, 32)]), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_those_of_transformers(name, tmp_path):
    torch = pytest.importorskip("torch")
    dequant = pytest.importorskip("transformers.integrations.gguf.dequant")
    kind = int(gguf.GGMLQuantizationType[name])
    if kind not in dequant.GGML_BLOCK:
        pytest.skip(f"transformers does not dequantise {name}")
    arrays = written(tmp_path / "x.gguf", name)
    found = open_gguf(tmp_path / "x.gguf").tensors
    for tensor, data in arrays.items():
        wanted = dequant.dequantize(torch.from_numpy(data.copy()).reshape(-1), kind).numpy().reshape(ROWS, COLUMNS)
        np.testing.assert_allclose(found[TENSORS[tensor]].rows(0, ROWS), in_order(wanted, tensor), rtol=1e-6, atol=0)
