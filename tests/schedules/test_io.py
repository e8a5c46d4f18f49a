"""Schedules in files, and orders against those of torch.distributed.pipelining."""

import dataclasses
import json
import pathlib
import re

import pytest
from hypothesis import given, settings

from megajax.schedules import io
from megajax.schedules.registry import make_schedule
from megajax.schedules.schedule import Operation, ScheduleError, pack
from megajax.schedules.stages import Placement, loop, wave
from tests.schedules.cases import named_schedules

GOLDEN = json.loads(pathlib.Path(__file__).with_name("golden_orders.json").read_text())["schedules"]
OURS = {
    "GPipe": "gpipe",
    "Interleaved1F1B": "interleaved_1f1b",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "zb_1p_interleaved",
    "ZBVZeroBubble": "zb_v",
    "DualPipeV": "dualpipe_v",
}


def label(row) -> str:
    return row["name"] + "-" + "-".join(map(str, row["sizes"]))


@pytest.mark.parametrize("row", GOLDEN, ids=label)
def test_orders_equal_torchs(row):
    stages, microbatches, chunks = row["sizes"]
    options = {}
    if row["name"] == "Interleaved1F1B":  # torch makes its groups as large as divides evenly
        options["group_size"] = microbatches // max(1, microbatches // stages)
    schedule = make_schedule(OURS[row["name"]], stages=stages, microbatches=microbatches, chunks=chunks, **options)
    want = [re.sub(r" \d+(WAIT_)?REDUCE_GRAD", "", order).replace(" ", ",") for order in row["orders"]]
    assert io.to_csv(schedule).splitlines() == want


@pytest.mark.parametrize("row", GOLDEN, ids=label)
def test_torchs_files_load(row, tmp_path):
    path = tmp_path / "torch.csv"
    path.write_text("\n".join(order.replace(" ", ",") for order in row["orders"]))
    schedule = io.load(str(path))
    assert [schedule.stages, schedule.microbatches, schedule.chunks] == row["sizes"]
    stages, _, chunks = row["sizes"]
    assert schedule.placement == (wave if row["name"] in ("ZBVZeroBubble", "DualPipeV") else loop)(stages, chunks)


@settings(max_examples=60, deadline=None)
@given(named_schedules())
def test_saved_schedules_load_unchanged(tmp_path_factory, schedule):
    folder = tmp_path_factory.mktemp("saved")
    io.save(schedule, str(folder / "x.json"))
    back = io.load(str(folder / "x.json"))
    assert (back.ticks, back.placement, back.split) == (schedule.ticks, schedule.placement, schedule.split)
    io.save(schedule, str(folder / "x.csv"))
    assert io.load(str(folder / "x.csv")).orders() == schedule.orders()


def test_the_placement_and_the_layers_of_stages_are_saved(tmp_path):
    """Both chunks of rank 0 are the first stages; of earlier files the placement is a name."""
    orders = [[Operation(op, chunk, 0) for op, chunks in (("F", (0, 1)), ("B", (1, 0))) for chunk in chunks]] * 2
    placed = Placement(((0, 2), (1, 3)), (0, 3, 3, 0))
    schedule = pack("mine", orders, microbatches=1, chunks=2, paired=True, placement=placed).validate()
    io.save(schedule, str(tmp_path / "x.json"))
    assert io.load(str(tmp_path / "x.json")).placement == placed
    with pytest.raises(ScheduleError, match=r"choose a name that ends in \.json"):
        io.save(schedule, str(tmp_path / "x.csv"))
    io.save(dataclasses.replace(schedule, placement=Placement(placed.stage_of)), str(tmp_path / "x.csv"))
    back = io.load(str(tmp_path / "x.csv"))
    assert (back.placement.stage_of, back.orders()) == (placed.stage_of, schedule.orders())
    v = io.to_json(make_schedule("zb_v", stages=2, microbatches=3, chunks=2))
    (tmp_path / "v.json").write_text(json.dumps(v | {"placement": "v"}))
    assert io.load(str(tmp_path / "v.json")).placement == wave(2, 2)


def test_pairs_blanks_and_communication_are_read(tmp_path):
    path = tmp_path / "pair.csv"
    path.write_text("0UNSHARD,0F0,,(0F1;0B0)OVERLAP_F_B,0B1,0RESHARD\n\n")
    schedule = io.load(str(path))
    assert ["".join(map(str, operation)) for operation in schedule.orders()[0]] == ["F00", "F01", "B00", "B01"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "0F0,0X0", "row 1, column 2: '0X0' is not an action; write stage"),
        (
            "x.csv",
            "0F0,0B0\n2F0,2B0",
            "the rows have stages 0, 2; with 2 rows and 1 chunks on each rank they must have each of 0 to 1 once",
        ),
        (
            "x.csv",
            "0F0,1F0,1B0,0B0\n2F0,2B0",
            r"row 2 \(rank 1\) has stages 2; each row must have as many as another, 2",
        ),
        ("x.csv", "0F0,0F1,0B0\n1F0,1B0,1F1,1B1", r"I1 of chunk 0 on rank 0 \(stage 0\) is missing"),
        ("x.csv", "0F0,0B0\n1F0,1B0,1F1", "rank 0 is done; rank 1 waits at F1 of chunk 0"),
        ("x.csv", "0B0,0F0", "rank 0 waits at B0 of chunk 0"),
        ("x.csv", "0F0,0F0,0B0", "F0 of chunk 0 is done twice"),
        ("x.csv", "", "it holds no operations"),
        ("x.csv", "0F0,0F2,0B0,0B2", r"F1 of chunk 0 on rank 0 \(stage 0\) is missing"),
        ("x.json", "{", "line 1: not JSON: Expecting property name"),
        ("x.json", "[]", 'it must hold {"orders"'),
        ("x.json", '{"orders": [[["F", 0]]]}', r'rank 0, operation 0: \["F", 0\] is not'),
        ("x.json", '{"orders": [[["F", 0, -1]]]}', r'rank 0, operation 0: \["F", 0, -1\] is not'),
        (
            "x.json",
            '{"orders": [[["F", 0, 0]]], "placement": "w"}',
            "placement is 'w'; it must be a list for each chunk",
        ),
        ("x.json", '{"orders": [[["F", 0, 0]]], "placement": [[1]]}', "each of the stages 0, 1, ... once"),
        (
            "x.json",
            '{"orders": [[["F", 0, 0]]], "placement": [[0, 1]]}',
            "placement is for 1 chunks on each of 2 ranks",
        ),
        ("x.json", '{"orders": [[["F", 0, 0]]], "layers": ["1"]}', "layers is .*; it must be a list with a number"),
        ("x.txt", "", r"must end in \.csv or \.json"),
    ],
)
def test_broken_files_are_refused(name, text, message, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ScheduleError, match=message) as error:
        io.load(str(path))
    assert str(path) in str(error.value)


def test_a_missing_file(tmp_path):
    with pytest.raises(ScheduleError, match="cannot read .*none.csv: No such file"):
        io.load(str(tmp_path / "none.csv"))
