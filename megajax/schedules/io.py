"""Schedules in files: CSV in torch.distributed.pipelining's notation, or JSON as `draw --json` writes it.

CSV has a row for each rank and an action in each cell: 2F0 is the forward of microbatch 0 on stage 2; B, I and W
likewise; a blank cell is idle. Communication actions of torch are ignored, since the order implies them here. A pair
(0F3;7B1)OVERLAP_F_B of a forward and a backward overlaps them in mixed ticks (`schedule.OVERLAP_PARTS`); in paired ticks,
and if it is a pair of other operations, they run one after the other. The chunks of a rank are the stages of its row, in
the order of the model.

JSON has `Placement.stage_of` as "placement" (a loop, if omitted), and may have its "layers".
"""

import csv
import functools
import io
import json
import os
import pathlib
import re
from typing import Any

from megajax.schedules.errors import UserError, shown
from megajax.schedules.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    MOST_FORWARDS,
    WEIGHT,
    Action,
    Operation,
    Schedule,
    ScheduleError,
    operations_of,
    pack,
)
from megajax.schedules.simulate import simulate_lockstep
from megajax.schedules.stages import Placement, loop, wave

ENDINGS = (".csv", ".json")
OPS = (FORWARD, BACKWARD, INPUT, WEIGHT)
ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")  # numbers that are int32
MOST_NUMBER = 10**9
EARLIER = {"loop": loop, "v": wave}  # placements by name, in files of earlier versions
PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")
COMMUNICATION = re.compile(r"\d+(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)\d*")


def is_schedule_file(name: str) -> bool:
    """Whether a schedule's name is the path of a file that `load` reads."""
    return name.endswith(ENDINGS)


def load(path: str) -> Schedule:
    """The schedule in a .csv or .json file, placed into ticks and validated; its name is the file's.

    Raises:
      ScheduleError: the file cannot be read, or does not hold a valid schedule; the message names the row and the cell.
    """
    try:
        stat = os.stat(path)
    except (OSError, ValueError):  # the read says what it is
        return _load(path)
    return _loaded(path, (stat.st_mtime_ns, stat.st_size, stat.st_ino))


@functools.lru_cache(maxsize=16)  # what is read of it, a run reads often
def _loaded(path: str, version: tuple[int, ...]) -> Schedule:
    return _load(path)


def _load(path: str) -> Schedule:
    file = pathlib.Path(path)
    if file.suffix not in ENDINGS:
        raise ScheduleError(f"{path}: a schedule's file must end in {' or '.join(ENDINGS)}")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # UnicodeDecodeError, or a path with a null character
        raise ScheduleError(f"{path} is not text: {error}") from None
    try:
        if file.suffix == ".json":
            return _from_json(file.stem, text)
        return _from_rows(file.stem, [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text))])
    except (ScheduleError, csv.Error) as error:  # of csv: a cell of more than 131,072 characters
        raise ScheduleError(f"{path}: {error}") from None


def save(schedule: Schedule, path: str) -> None:
    """Writes a schedule. `load` returns the same orders, and from JSON the same ticks.

    Raises:
      ScheduleError: the ending is neither .csv nor .json, or it is .csv and the placement has layers.
      OSError: the file cannot be written.
    """
    text = file_text(schedule, path)
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def file_text(schedule: Schedule, path: str) -> str:
    """What `save` writes; raises its ScheduleError."""
    if pathlib.Path(path).suffix not in ENDINGS:
        raise ScheduleError(f"{path}: a schedule is saved in a file that must end in {' or '.join(ENDINGS)}")
    if path.endswith(".csv") and schedule.placement.layers is not None:
        raise ScheduleError(f"{path}: CSV has no room for the layers of each stage: choose a name that ends in .json")
    return to_csv(schedule) if path.endswith(".csv") else json.dumps(to_json(schedule)) + "\n"


def to_csv(schedule: Schedule) -> str:
    """The orders in torch's notation, one line for each rank."""

    def cell(rank: int, action: Action) -> str:
        if isinstance(action, Operation):
            return f"{schedule.stage(action.chunk, rank)}{action.op}{action.microbatch}"
        return f"({';'.join(cell(rank, operation) for operation in action)})OVERLAP_F_B"

    lines = [",".join(cell(rank, action) for action in order) for rank, order in enumerate(schedule.actions())]
    return "\n".join(lines) + "\n"


def to_json(schedule: Schedule) -> dict[str, Any]:
    """The orders, sizes, placement and kind of tick, as JSON values; two operations that overlap are a list of both."""
    return {
        "schedule": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "placement": schedule.placement.stage_of,
        **({} if schedule.placement.layers is None else {"layers": schedule.placement.layers}),
        "paired": schedule.paired,
        "orders": [
            [list(action if isinstance(action, Operation) else map(list, action)) for action in order]
            for order in schedule.actions()
        ],
    }


def from_orders(
    name: str,
    orders: list[list[Action]],
    *,
    chunks: int,
    placement: Placement | None = None,
    paired: bool | None = None,
) -> Schedule:
    """Places orders into ticks: mixed ticks if backwards are split, else paired or mixed, whichever takes less time.

    Raises:
      ScheduleError: the orders deadlock, or an operation is missing.
    """
    operations = [operation for order in orders for action in order for operation in operations_of(action)]
    if not operations:
        raise ScheduleError("it holds no operations")
    if len(operations) > 3 * MOST_FORWARDS:
        raise ScheduleError(f"it holds {len(operations)} operations; at most {3 * MOST_FORWARDS} are legal")
    sizes = {"microbatches": 1 + max(operation.microbatch for operation in operations), "chunks": chunks}
    split = any(operation.op in (INPUT, WEIGHT) for operation in operations)

    def place(paired: bool) -> Schedule:
        parts = None if paired else {BACKWARD: 2}
        options = {"paired": paired, "parts": parts, "placement": placement, "split": split}
        return pack(name, orders, **sizes, **options).validate()

    if split or paired is not None:
        return place(bool(paired) and not split)
    return min((place(True), place(False)), key=lambda schedule: simulate_lockstep(schedule).makespan)


def _from_json(name: str, text: str) -> Schedule:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"line {error.lineno}: not JSON: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # a number of more than 4,300 digits; too many levels
        raise ScheduleError(f"not a schedule: {error}") from None
    if not isinstance(values, dict) or not isinstance(values.get("orders"), list) or not values["orders"]:
        raise ScheduleError('it must hold {"orders": [[[op, chunk, microbatch], ...] for each rank], ...}')
    paired = values.get("paired")
    if not (paired is None or isinstance(paired, bool)):
        raise ScheduleError(f"paired is {shown(paired)}; it must be true or false, or omitted")
    for rank, order in enumerate(values["orders"]):
        if not isinstance(order, list):
            raise ScheduleError(f"rank {rank} has {shown(order)}; it must have a list of operations")
    orders = [
        [_action(rank, place, value) for place, value in enumerate(order)]
        for rank, order in enumerate(values["orders"])
    ]
    every = (operation for order in orders for action in order for operation in operations_of(action))
    chunks = 1 + max((operation.chunk for operation in every), default=0)
    placement = _placement(values.get("placement", "loop"), values.get("layers"), len(orders), chunks)
    return from_orders(name, orders, chunks=chunks, placement=placement, paired=paired)


def _placement(stage_of: Any, layers: Any, ranks: int, chunks: int) -> Placement:
    numbers = lambda row: isinstance(row, list) and all(type(n) is int and 0 <= n < MOST_NUMBER for n in row)  # noqa: E731
    if isinstance(stage_of, str) and stage_of in EARLIER:
        stage_of = EARLIER[stage_of](ranks, chunks).stage_of
    elif not isinstance(stage_of, list) or not all(map(numbers, stage_of)):
        raise ScheduleError(f"placement is {shown(stage_of)}; it must be a list for each chunk, of each rank's stage")
    if not (layers is None or numbers(layers)):
        raise ScheduleError(f"layers is {shown(layers)}; it must be a list with a number for each stage, or omitted")
    try:
        placed = Placement(tuple(map(tuple, stage_of)), layers and tuple(layers))
    except UserError as error:
        raise ScheduleError(str(error)) from None
    if (placed.chunks, placed.ranks) != (chunks, ranks):
        raise ScheduleError(
            f"placement is for {placed.chunks} chunks on each of {placed.ranks} ranks, but the orders are of {chunks} on "
            f"each of {ranks}"
        )
    return placed


def _action(rank: int, place: int, value: Any) -> Action:
    if isinstance(value, list) and len(value) == 2 and all(isinstance(one, list) for one in value):
        both = tuple(_operation(rank, place, one) for one in value)
        if [operation.op for operation in both] == [FORWARD, BACKWARD]:
            return both
        raise ScheduleError(f"rank {rank}, operation {place}: two that overlap must be a forward and then a backward")
    return _operation(rank, place, value)


def _operation(rank: int, place: int, value: Any) -> Operation:
    whole = (
        isinstance(value, list) and len(value) == 3 and all(type(n) is int and 0 <= n < MOST_NUMBER for n in value[1:])
    )
    if not whole or value[0] not in OPS:
        found = shown(value).replace("'", '"')  # as JSON writes it
        raise ScheduleError(
            f"rank {rank}, operation {place}: {found} is not [op, chunk, microbatch] such as "
            f'["F", 0, 3]; op is one of {", ".join(OPS)}'
        )
    return Operation(*value)


def _from_rows(name: str, rows: list[list[str]]) -> Schedule:
    while rows and not any(rows[-1]):
        rows.pop()
    actions = [
        [action for column, cell in enumerate(row) for action in _actions(rank, column, cell)]
        for rank, row in enumerate(rows)
    ]
    held = [sorted({operation.chunk for action in row for operation in operations_of(action)}) for row in actions]
    chunks, every = max(map(len, held), default=0), sorted(stage for own in held for stage in own)
    for rank, own in enumerate(held):
        if len(own) != chunks:
            raise ScheduleError(
                f"row {rank + 1} (rank {rank}) has stages {_list(own)}; each row must have as many as another, {chunks}"
            )
    if every != list(range(len(every))):
        raise ScheduleError(
            f"the rows have stages {_list(every)}; with {len(held)} rows and {chunks} chunks on each rank they must have "
            f"each of 0 to {len(every) - 1} once"
        )

    def placed(own: list[int], action: Action) -> Action:
        if isinstance(action, Operation):
            return action._replace(chunk=own.index(action.chunk))
        return tuple(placed(own, one) for one in action)

    orders = [[placed(own, action) for action in row] for own, row in zip(held, actions, strict=True)]
    placement = Placement(tuple(zip(*held, strict=True))) if every else None
    return from_orders(name, orders, chunks=chunks, placement=placement)


def _actions(rank: int, column: int, cell: str) -> list[Action]:
    """What a cell holds, if anything, with the stage in place of the chunk."""
    pair = PAIR.fullmatch(cell)
    if pair:
        parts = [part.strip() for part in re.split("[;,]", pair[1])]
        if not any(map(PAIR.fullmatch, parts)):
            actions = [action for part in parts for action in _actions(rank, column, part)]
            overlap = [operation.op for operation in actions] == [FORWARD, BACKWARD]
            return [tuple(actions)] if overlap else actions
    action = ACTION.fullmatch(cell)
    if action:
        return [Operation(action[2], int(action[1]), int(action[3]))]
    if cell and not COMMUNICATION.fullmatch(cell):
        raise ScheduleError(
            f"row {rank + 1}, column {column + 1}: {shown(cell)} is not an action; write stage, op ({', '.join(OPS)}) and "
            "microbatch, such as 2F0, or leave the cell blank"
        )
    return []


def _list(stages: list[int]) -> str:
    most = stages[:20]
    return ", ".join([*map(str, most), *(["..."] if len(stages) > len(most) else [])]) or "none"
