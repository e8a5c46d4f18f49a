"""Collectives that deadlock are found and named, in small programs by hand, and in compiled ones of which one is changed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.estimate.collective_members import Members, named
from megajax.estimate.collective_order import check
from megajax.estimate.hlo_demand import Demand
from megajax.estimate.hlo_parser import Line, computations
from megajax.estimate.rank_walk import Walk
from megajax.runtime.compat import compiled_text
from tests.train import test_program

HEADER = "HloModule test, is_scheduled=true, num_partitions=4\n"
FORWARD = "/F/while/body/"
ROWS, COLUMNS, ALL = "{{0,1},{2,3}}", "{{0,2},{1,3}}", "{{0,1,2,3}}"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
LATER = """
%start_rows (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = f32[8]{0} all-reduce-start(%x), channel_id=1, replica_groups=[2,2]<=[4], use_global_device_ids=true
  %start2 = f32[8]{0} all-reduce-start(%x), channel_id=2, replica_groups=[2,2]<=[4], use_global_device_ids=true
  %done = f32[8]{0} all-reduce-done(%start)
  ROOT %done2 = f32[8]{0} all-reduce-done(%start2)
}
"""


def reduce(name: str, groups: str, channel: int = 1, operand: str = "x", type_: str = "f32[8]{0}") -> str:
    return (
        f"  %{name} = {type_} all-reduce(%{operand}), channel_id={channel}, replica_groups={groups}, "
        f'use_global_device_ids=true, to_apply=%add, metadata={{op_name="jit(f)/{name}"}}'
    )


def computation(name: str, *lines: str, parameter: str = "%x = f32[8]{0} parameter(0)") -> str:
    """The last line is the result."""
    body = "\n".join(["  " + parameter, *lines[:-1], "  ROOT " + lines[-1].lstrip()])
    return f"\n%{name} (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def program(*lines: str, before: str = "", inputs: str = "  %x = f32[8]{0} parameter(0)") -> str:
    body = "\n".join([inputs, *lines[:-1], "  ROOT " + lines[-1].lstrip()])
    return f"{HEADER}{ADD}{before}\nENTRY %main (x: f32[8]) -> f32[8] {{\n{body}\n}}\n"


def chosen(table: str, *, branches: str = "%none, %some") -> tuple[str, ...]:
    """A conditional on an entry of `table` for each rank."""
    return (
        f"  %table = s32[4]{{0}} constant({table})",
        "  %rank = u32[] partition-id()",
        "  %entry = s32[1]{0} dynamic-slice(%table, %rank), dynamic_slice_sizes={1}",
        "  %index = s32[] bitcast(%entry)",
        f"  %taken = f32[8]{{0}} conditional(%index, %x, %x), branch_computations={{{branches}}}",
    )


NONE = computation("none", "%same = f32[8]{0} copy(%x)")


def test_ranks_in_one_order():
    verdict = check(program(reduce("rows", ROWS), reduce("columns", COLUMNS, 2)))
    assert verdict.consistent
    assert str(verdict) == "collectives: 2 a rank, order consistent on all 4 ranks, no deadlock"


@pytest.mark.parametrize(
    ("attributes", "groups"),
    [
        ("channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true", ((0, 1), (2, 3))),
        ("channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), use_global_device_ids=true", ((0, 2), (1, 3))),
        ("channel_id=1, replica_groups=[1,4]<=[4], use_global_device_ids=true", ((0, 1, 2, 3),)),
        ("channel_id=1, replica_groups=mesh['a'=2,'b'=2] {'a'}, use_global_device_ids=true", ((0, 2), (1, 3))),
        ("channel_id=1, replica_groups={}, use_global_device_ids=true", ((0, 1, 2, 3),)),
        ("channel_id=1, replica_groups={{0}}", ((0, 1, 2, 3),)),  # of replicas, each with its partitions
        ("replica_groups={}", ((0,), (1,), (2,), (3,))),  # within each partition
    ],
)
def test_forms_of_groups(attributes, groups):
    line = Line("sum", "f32[8]{0}", "all-reduce", f"%x), {attributes}, to_apply=%add")
    assert Members(1, 4).of(line) == groups


def test_groups_over_two_replicas():
    line = Line("sum", "f32[8]{0}", "all-to-all", "%x), channel_id=1, replica_groups={{0,1}}")
    assert Members(2, 2).of(line) == ((0, 1), (2, 3))
    line = Line("sum", "f32[8]{0}", "all-reduce", "%x), replica_groups={{0,1}}, to_apply=%add")
    assert Members(2, 2).of(line) == ((0, 2), (1, 3))
    assert named([3, 0, 1, 7, 2]) == "ranks 0-3, 7" and named([5]) == "rank 5"
    assert named(range(0, 512, 8)) == "ranks 0, 8, 16, 24, 32, 40, 48, 56, ... (64)"


def test_a_branch_that_whole_groups_take():
    some = computation("some", reduce("rows", ROWS))
    verdict = check(program(*chosen("{1, 1, 0, 0}"), before=some + NONE))
    assert verdict.consistent and (verdict.fewest, verdict.most) == (0, 1)


def test_a_branch_that_one_member_does_not_take():
    some = computation("some", reduce("rows", ROWS))
    verdict = check(program(*chosen("{1, 0, 1, 1}"), reduce("end", ALL, 2, "taken"), before=some + NONE))
    assert not verdict.consistent
    assert verdict.faults[0] == (
        "rank 0 waits at all-reduce (channel 1) jit(f)/rows for rank 1 (at all-reduce (channel 2) jit(f)/end)"
    )


def test_the_elements_of_a_constant_have_to_be_in_the_text():
    some = computation("some", reduce("rows", ROWS))
    verdict = check(program(*chosen("{...}"), before=some + NONE))
    assert not verdict.consistent and not verdict.faults
    assert "by the constant table, whose elements are not in the text, which" in verdict.unknown[0]


LOOP = """
%more (state: (s32[], f32[8])) -> pred[] {
  %state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %two = s32[] constant(2)
  ROOT %go = pred[] compare(%i, %two), direction=LT
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8] get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %table = s32[2,4]{1,0} constant(TABLE)
  %rank = u32[] partition-id()
  %entry = s32[1,1]{1,0} dynamic-slice(%table, %i, %rank), dynamic_slice_sizes={1,1}
  %index = s32[] bitcast(%entry)
  %done = f32[8] conditional(%index, %x, %x), branch_computations={%rows, %columns}
  ROOT %result = (s32[], f32[8]) tuple(%next, %done)
}
"""


@pytest.mark.parametrize(
    ("table", "consistent"),
    [("{ { 0, 0, 0, 0 }, { 1, 1, 1, 1 } }", True), ("{ { 0, 1, 1, 0 }, { 1, 0, 0, 1 } }", False)],
)
def test_a_cycle_among_groups_of_which_each_is_consistent(table, consistent):
    """Ranks 0 and 3 sum along rows first, and 1 and 2 along columns: each waits for another."""
    before = computation("rows", reduce("row", ROWS)) + computation("columns", reduce("column", COLUMNS, 2))
    lines = (
        "  %zero = s32[] constant(0)",
        "  %start = (s32[], f32[8]) tuple(%zero, %x)",
        "  %loop = (s32[], f32[8]) while(%start), condition=%more, body=%body",
        "  %end = f32[8] get-tuple-element(%loop), index=1",
    )
    verdict = check(program(*lines, before=before + LOOP.replace("TABLE", table)))
    assert verdict.consistent is consistent
    assert consistent or verdict.faults == (
        "ranks 0, 3 wait at all-reduce (channel 1) jit(f)/row for ranks 1-2 (at all-reduce (channel 2) jit(f)/column)",
        "ranks 1-2 wait at all-reduce (channel 2) jit(f)/column for ranks 0, 3 (at all-reduce (channel 1) jit(f)/row)",
    )


def test_starts_in_one_order_and_ends_in_any():
    verdict = check(program("  %call = f32[8]{0} call(%x), to_apply=%start_rows", before=LATER))
    assert verdict.consistent and verdict.most == 2


def permute(pairs: str) -> str:
    attributes = f'channel_id=3, source_target_pairs={pairs}, metadata={{op_name="s"}}'
    return f"  %sent = f32[8]{{0}} collective-permute(%x), {attributes}"


def test_a_permute_in_a_branch():
    """Its peer does not take the branch; and where it does, so must all other devices."""
    verdict = check(program(*chosen("{1, 0, 1, 1}"), before=computation("some", permute("{{0,1},{2,3}}")) + NONE))
    assert verdict.faults == (
        "collective-permute (channel 3) s is in a branch of ranks 0, 2-3, and not of rank 1, rank 0's peer",
    )
    verdict = check(program(*chosen("{1, 1, 0, 0}"), before=computation("some", permute("{{0,1}}")) + NONE))
    assert verdict.faults == ("ranks 0-1 wait at collective-permute (channel 3) s for ranks 2-3 (ended)",)
    verdict = check(program(*chosen("{1, 1, 1, 1}"), before=computation("some", permute("{{0,1}}")) + NONE))
    assert verdict.consistent


def test_groups_that_leave_a_rank_out_or_have_it_twice():
    assert "is reached by rank 3, in none of its groups" in str(check(program(reduce("rows", "{{0,1,2}}"))))
    assert "has rank 1 in more than one group" in str(check(program(reduce("rows", "{{0,1},{1,2,3}}"))))


def on_data(groups: str, branch: str, array: bool = True) -> str:
    """A branch on whether a sum over these groups is positive."""
    scalar = reduce("total", groups, 5, "part", "f32[]") if groups else "  %total = f32[] copy(%part)"
    lines = (
        "  %zero = f32[] constant(0)",
        "  %part = f32[] reduce(%x, %zero), dimensions={0}, to_apply=%add"
        if array
        else '  %part = f32[] parameter(1), metadata={op_name="scale"}',
        scalar,
        "  %is = pred[] compare(%total, %zero), direction=GT",
        "  %taken = f32[8]{0} conditional(%is, %x, %x), true_computation=%some, false_computation=%none",
    )
    return program(*lines, before=computation("some", reduce("rows", branch)) + NONE)


def test_branches_on_data_that_members_share():
    for groups, branch in ((ALL, ROWS), (ROWS, ROWS)):
        verdict = check(on_data(groups, branch))
        assert verdict.consistent and verdict.shared == 1
        assert "1 to 2 (1 in branches that depend on data, the same on all members) a rank" in str(verdict)
    assert check(on_data("", COLUMNS, array=False)).consistent  # on an input: one number is the same on all ranks


def test_branches_on_data_that_may_differ():
    for groups in (COLUMNS, ""):
        verdict = check(on_data(groups, ROWS))
        assert not verdict.consistent and not verdict.faults
        assert re.search(
            r"all-reduce \(channel 1\) jit\(f\)/rows: whether .* may differ between ranks 0-1", str(verdict)
        )


def test_a_loop_on_data():
    """Zero or more iterations: legal where all members compute its condition alike, from what the loop carries."""
    more = """
%more (state: (f32[], f32[8])) -> pred[] {
  %state = (f32[], f32[8]) parameter(0)
  %error = f32[] get-tuple-element(%state), index=0
  %small = f32[] constant(0.5)
  ROOT %go = pred[] compare(%error, %small), direction=GT
}

%body (state: (f32[], f32[8])) -> (f32[], f32[8]) {
  %state = (f32[], f32[8]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %error = f32[] get-tuple-element(%state), index=0
REDUCE
  ROOT %next = (f32[], f32[8]) tuple(%sum, %x)
}
"""
    lines = (
        "  %error = f32[] parameter(1)",
        "  %start = (f32[], f32[8]) tuple(%error, %x)",
        "  %loop = (f32[], f32[8]) while(%start), condition=%more, body=%body",
        "  %end = f32[8] get-tuple-element(%loop), index=1",
    )
    alike = reduce("sum", ALL, 1, "error", "f32[]")
    assert check(program(*lines, before=more.replace("REDUCE", alike))).consistent
    mixed = "  %rank = u32[] partition-id()\n  %own = f32[] convert(%rank)\n" + alike.replace("%sum", "%all").replace(
        "(%error", "(%own"
    )
    assert check(
        program(*lines, before=more.replace("REDUCE", mixed + "\n  %sum = f32[] add(%all, %error)"))
    ).consistent
    apart = mixed + "\n  %sum = f32[] add(%own, %error)"
    verdict = check(program(*lines, before=more.replace("REDUCE", apart)))
    assert not verdict.consistent and "while loop" in str(verdict)


def test_what_is_not_understood_is_named():
    sends = program('  %sent = (f32[8], u32[], token[]) send(%x), channel_id=1, metadata={op_name="to/next"}')
    assert str(check(sends)).endswith("send to/next is not understood")
    assert "not scheduled" in str(check(sends.replace("is_scheduled=true, ", "")))
    unknown = program(reduce("rows", "something"))
    assert "the groups of all-reduce jit(f)/rows have an unknown form" in str(check(unknown))
    some = computation("some", reduce("rows", ROWS))
    called = chosen("{1, 1, 1, 1}")[1:]
    opaque = '  %table = s32[4]{0} custom-call(%x), custom_call_target="t", metadata={op_name="mystery"}'
    assert "by custom-call mystery" in str(check(program(opaque, *called, before=some + NONE)))


TABLE = np.array([[3, 1, 4, 1], [5, 9, 2, 6], [5, 3, 5, 8], [9, 7, 9, 3], [2, 3, 8, 4]], np.int32)
EXPRESSIONS = {
    "table": lambda rank: jnp.asarray(TABLE)[1, rank],
    "arithmetic": lambda rank: (7 * rank - 3) % 5 + abs(rank - 2) // 2 - jnp.sign(rank - 1),
    "bits": lambda rank: ((rank << 2 | 1) ^ 3) >> 1 & 7,
    "select": lambda rank: jnp.where((rank > 0) & ~(rank == 2), jnp.minimum(rank, 2), 4),
    "clip": lambda rank: jnp.clip(TABLE[0, 2] * rank - 3, 0, 6),
    "sum": lambda rank: jnp.sum(jnp.asarray(TABLE)[:, rank] > 3),
    "cumulated": lambda rank: jnp.cumsum(jnp.roll(jnp.asarray(TABLE)[rank], rank))[1] % 7,
    "unsigned": lambda rank: ((rank.astype(jnp.uint32) - 2) >> 29).astype(jnp.int32),
    "loop": lambda rank: lax.fori_loop(0, rank + 1, lambda i, total: total + jnp.asarray(TABLE)[i, 1], 0) % 6,
    "update": lambda rank: lax.dynamic_update_slice(jnp.zeros(6, jnp.int32), jnp.asarray(TABLE)[0], (rank,))[3],
    "switch": lambda rank: lax.switch(rank, [lambda: 3, lambda: 0, lambda: jnp.int32(TABLE[2, 3])]),
    "padded": lambda rank: jnp.pad(jnp.asarray(TABLE)[:, 1], (1, 2), constant_values=6).reshape(2, 4).T[rank, 1],
    "max over ranks": lambda rank: lax.pmax(rank * (3 - rank), "a"),
    "received": lambda rank: lax.ppermute(rank + 1, "a", [(0, 2), (1, 3), (2, 0)]),
    "gathered": lambda rank: lax.all_gather(rank * rank, "a")[3 - rank],
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_predicates_are_evaluated(name):
    """How often each of eight devices goes through a loop with a sum, against what the devices return."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def count(x):
        return EXPRESSIONS[name](lax.axis_index("a")) + 0 * x.astype(jnp.int32)

    def body(x):
        step = lambda _, y: lax.psum(y, "b") * 0.5  # noqa: E731
        return lax.fori_loop(0, EXPRESSIONS[name](lax.axis_index("a")), step, x)

    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(("a", "b")), out_specs=P(("a", "b")), check_vma=False
    )
    x = jnp.ones(8)
    text = compiled_text(jax.jit(shard(body)).lower(x).compile())
    walk = Walk(Demand(*computations(text)), Members(1, 8))
    walk.run()
    sums = [event for event in walk.events if walk.members.of(walk.lines[event.line][1])[0] == (0, 1)]
    assert not any(event.unknowns for event in sums)
    found = sum((walk.sets[event.ranks].astype(int) for event in sums), np.zeros(8, int))
    np.testing.assert_array_equal(found, np.maximum(0, jax.jit(shard(count))(x)))
    assert check(text).consistent


@functools.cache
def step_text() -> str:
    """1F1B on data 2 x pipe 2 x tensor 2, the step of a test of tests/train/test_program.py."""
    return compiled_text(test_program.compiled((2, 2, 2), "1f1b", 1, 4)[1])


def line_with(text: str, *words: str) -> str:
    """The first line with all of these words."""
    return next(line for line in text.splitlines() if all(word in line for word in words))


def without_rank_3(text: str, line: str, instead: str = "same") -> str:
    """The program with `line` in a branch, instead of which rank 3 runs computation `instead`."""
    name, type_, rest = re.match(r" *(?:ROOT )?(%\S+) = (\S+) (.*)", line).groups()
    branch = (
        "  %t.1 = s32[8]{0} constant({0, 0, 0, 1, 0, 0, 0, 0})\n  %r.1 = u32[] partition-id()\n"
        "  %e.1 = s32[1]{0} dynamic-slice(%t.1, %r.1), dynamic_slice_sizes={1}\n  %i.1 = s32[] bitcast(%e.1)\n"
        f"  {name} = {type_} conditional(%i.1, %o, %o), branch_computations={{%do.{name[1:]}, %{instead}}}"
    )
    moved = f"%do.{name[1:]} () -> f32[] {{\n  ROOT {name} = {type_} {rest}\n}}\n\n"
    same = "%same () -> f32[] {\n  ROOT %p = f32[] parameter(0)\n}\n\n"
    return text.replace(line, branch).replace("ENTRY ", f"{moved}{'' if '%same ()' in text else same}ENTRY ", 1)


@pytest.mark.slow
def test_a_compiled_step():
    """As many collectives as the trip counts of its schedule give, on each rank."""
    text = step_text()
    verdict = check(text)
    assert verdict.consistent and verdict.shared == 0 and verdict.fewest == verdict.most > 200


def test_a_collective_that_one_rank_leaves_out():
    text = step_text()
    faults = check(without_rank_3(text, line_with(text, " all-gather(", FORWARD))).faults
    assert re.match(
        r"rank 2 waits at all-gather .*/F/while/body/.* for rank 3 \(at all-reduce .*/F/while/body", faults[0]
    )


def test_a_send_that_one_rank_leaves_out():
    text = step_text()
    faults = check(without_rank_3(text, line_with(text, " collective-permute("))).faults
    assert re.match(
        r"collective-permute .*/send/ppermute is in a branch of ranks 0-2, 4-7, and not of rank 3", faults[0]
    )


def test_two_collectives_in_another_order_on_one_rank():
    text = step_text()
    first, second = (line_with(text, f" {kind}(", FORWARD) for kind in ("all-gather", "all-reduce"))
    names = [re.match(r" *(?:ROOT )?%(\S+) =", line)[1] for line in (first, second)]
    text = without_rank_3(text, first, f"do.{names[1]}")
    faults = check(without_rank_3(text, second, f"do.{names[0]}")).faults
    assert any(re.match(r"rank 3 waits at all-reduce .* for rank 2 \(at all-gather", fault) for fault in faults)


def test_a_collective_over_other_groups():
    """Over the stages instead of over tensor: a stage without work does not come to it."""
    text = step_text()
    line = line_with(text, " all-gather(", FORWARD)
    other = re.sub(r"replica_groups=\S+", "replica_groups={{0,2},{1,3},{4,6},{5,7}},", line)
    faults = check(text.replace(line, other)).faults
    assert re.match(r"ranks .* wait at all-gather .*/F/while/body/.* for ranks", faults[0])


def test_the_tables_of_the_schedule_have_to_be_in_the_text():
    text = re.sub(
        r"= s32\[(\d+,2)\](\S*) constant\(.*?\)(, metadata.*)?\n", r"= s32[\1]\2 constant({...})\n", step_text()
    )
    verdict = check(text)
    assert verdict.unknown and not verdict.faults and "by the constant" in str(verdict)
