"""Files of other tools that would take more memory, or recurse deeper, than they may: one line."""

import json
import pickle
import struct

import pytest

from megajax.config import ConfigError
from megajax.interop.megatron.torch_files import check_pickle
from megajax.interop.safetensors import open_tensors


def write(path, entries: dict, size: int) -> None:
    header = json.dumps(entries).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))


def tensor(begin: int, end: int) -> dict:
    return {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "spans",
    [[(0, 8), (0, 8)], [(0, 16), (4, 8)], [(8, 16), (0, 12)], [(0, 16), (2, 2), (4, 8)], [(0, 4), (4, 12), (8, 16)]],
)
def test_tensors_in_the_same_bytes_are_refused(tmp_path, spans):
    write(tmp_path / "model.safetensors", {f"t{i}": tensor(*span) for i, span in enumerate(spans)}, 16)
    with pytest.raises(ConfigError, match="in the same bytes: it is damaged; download it again"):
        open_tensors(tmp_path)


def test_tensors_beside_one_another_and_empty_ones_are_read(tmp_path):
    spans = [(4, 12), (0, 4), (12, 16), (8, 8), (0, 0)]
    write(tmp_path / "model.safetensors", {f"t{i}": tensor(*span) for i, span in enumerate(spans)}, 16)
    assert len(open_tensors(tmp_path)) == 5


HOSTILE = {
    "a memo of 64 GB": b"\x80\x04" + b"K\x01" + b"r" + struct.pack("<I", 2**32 - 1) + b".",
    "a text memo": b"\x80\x02" + b"K\x01" + b"p4000000000\n.",
    "an array of 1 TB": b"\x80\x05" + b"\x96" + struct.pack("<Q", 2**40) + b".",
    "bytes of 1 TB": b"\x80\x04" + b"\x8e" + struct.pack("<Q", 2**40) + b".",
    "a text of 1 TB": b"\x80\x04" + b"\x8d" + struct.pack("<Q", 2**40) + b".",
    "a frame": b"\x80\x04" + b"\x95" + struct.pack("<Q", 2**62) + b"K\x01",
    "no end": b"\x80\x04K\x01",
    "an unknown code": b"\x80\x04\xff",
    "nothing": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_takes_more_memory_than_its_size_is_refused(name):
    with pytest.raises(ValueError):
        check_pickle(HOSTILE[name])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_any_protocol_are_read(protocol):
    value = {"names": [f"layer {i}" for i in range(5000)], "shapes": [(i, 2.5, None, True) for i in range(500)]}
    value["bytes"] = bytearray(5000)
    check_pickle(pickle.dumps(value, protocol=protocol))


def test_gguf_arrays_in_arrays_are_refused(tmp_path):
    gguf_file = pytest.importorskip("megajax.interop.gguf.file")
    pytest.importorskip("gguf")
    key = b"general.architecture"
    data = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key + struct.pack("<I", 9)
    data += struct.pack("<IQ", 9, 1) * 20_000 + struct.pack("<IQ", 4, 0)
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(ConfigError, match="arrays in arrays"):
        gguf_file.open_gguf(tmp_path / "model.gguf")
