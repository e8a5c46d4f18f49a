"""Kernels and times read from a module whose bytes, FLOPs and order are counted by hand."""

import dataclasses
import re

import pytest

from megajax.config import ParallelConfig
from megajax.estimate.gpus import find_gpu
from megajax.estimate.hlo import read
from megajax.estimate.hlo_parser import computations
from megajax.estimate.kernels import kernel_of
from megajax.estimate.rates import NETWORK_HOP, NVLINK_HOP, RAGGED_PEER, RAGGED_SHARE, START, Rates, rates_of
from megajax.estimate.roofline import EXPOSED, GAPS, SYNCS, account, seconds_by_name
from megajax.runtime.mesh import mesh_places
from tests.estimate.hlo_counter import Counter

# One layer of 12 is [64, 32]. Each iteration of the loop cuts a layer's weights out of the stack, multiplies, adds the
# product to an accumulator of the stack in place, and gathers 128 of 256 bf16 numbers beside the matmul.
MODULE = """HloModule step, is_scheduled=true

%cut (p0: bf16[12,64,32], p1: s32[]) -> bf16[64,32] {
  %p0 = bf16[12,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = bf16[1,64,32]{2,1,0} dynamic-slice(%p0, %p1, %zero, %zero), dynamic_slice_sizes={1,64,32}
  ROOT %flat = bf16[64,32]{1,0} bitcast(%slice)
}

%accumulate (q0: f32[12,16,32], q1: bf16[16,32], q2: s32[]) -> f32[12,16,32] {
  %q0 = f32[12,16,32]{2,1,0} parameter(0)
  %q2 = s32[] parameter(2)
  %none = s32[] constant(0)
  %old = f32[1,16,32]{2,1,0} dynamic-slice(%q0, %q2, %none, %none), dynamic_slice_sizes={1,16,32}
  %q1 = bf16[16,32]{1,0} parameter(1)
  %wide = f32[16,32]{1,0} convert(%q1)
  %new = f32[1,16,32]{2,1,0} bitcast(%wide)
  %sum = f32[1,16,32]{2,1,0} add(%old, %new)
  ROOT %put = f32[12,16,32]{2,1,0} dynamic-update-slice(%q0, %sum, %q2, %none, %none)
}

%store (r0: bf16[8,16,32], r1: bf16[16,32], r2: s32[]) -> bf16[8,16,32] {
  %r0 = bf16[8,16,32]{2,1,0} parameter(0)
  %r1 = bf16[16,32]{1,0} parameter(1)
  %one = bf16[1,16,32]{2,1,0} bitcast(%r1)
  %r2 = s32[] parameter(2)
  %start = s32[] constant(0)
  ROOT %kept = bf16[8,16,32]{2,1,0} dynamic-update-slice(%r0, %one, %r2, %start, %start)
}

%activate (s0: bf16[16,32]) -> bf16[16,32] {
  %s0 = bf16[16,32]{1,0} parameter(0)
  ROOT %tanh = bf16[16,32]{1,0} tanh(%s0)
}

%matmul_of_slice (t0: bf16[16,64], t1: bf16[12,64,32], t2: s32[]) -> (bf16[16,32], s8[1024]) {
  %t0 = bf16[16,64]{1,0} parameter(0)
  %t1 = bf16[12,64,32]{2,1,0} parameter(1)
  %t2 = s32[] parameter(2)
  %nil = s32[] constant(0)
  %part = bf16[1,64,32]{2,1,0} dynamic-slice(%t1, %t2, %nil, %nil), dynamic_slice_sizes={1,64,32}
  %weights = bf16[64,32]{1,0} bitcast(%part)
  ROOT %call = (bf16[16,32]{1,0}, s8[1024]{0}) custom-call(%t0, %weights), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
}

%condition (c: (s32[], bf16[12,64,32])) -> pred[] {
  %c = (s32[], bf16[12,64,32]) parameter(0)
  ROOT %less = pred[] compare(%c, %c), direction=LT
}

%body (state: (s32[])) -> (s32[]) {
  %state = (s32[], bf16[12,64,32]{2,1,0}, f32[12,16,32]{2,1,0}, bf16[16,64]{1,0}, bf16[128]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %stack = bf16[12,64,32]{2,1,0} get-tuple-element(%state), index=1
  %totals = f32[12,16,32]{2,1,0} get-tuple-element(%state), index=2
  %x = bf16[16,64]{1,0} get-tuple-element(%state), index=3
  %share = bf16[128]{0} get-tuple-element(%state), index=4
  %w = bf16[64,32]{1,0} fusion(%stack, %i), kind=kLoop, calls=%cut
  %gather = (bf16[128]{0}, bf16[256]{0}) all-gather-start(%share), channel_id=1, replica_groups={{0,1}}, dimensions={0}
  %product = (bf16[16,32]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %y = bf16[16,32]{1,0} get-tuple-element(%product), index=0
  %gathered = bf16[256]{0} all-gather-done(%gather)
  %added = f32[12,16,32]{2,1,0} fusion(%totals, %y, %i), kind=kLoop, calls=%accumulate
  ROOT %next = (s32[]) tuple(%i)
}

ENTRY %main (a: bf16[16,64]) -> bf16[16,32] {
  %a = bf16[16,64]{1,0} parameter(0)
  %layers = bf16[12,64,32]{2,1,0} parameter(1)
  %place = s32[] parameter(2)
  %buffer = bf16[8,16,32]{2,1,0} parameter(3)
  %init = (s32[], bf16[12,64,32]{2,1,0}, f32[12,16,32]{2,1,0}, bf16[16,64]{1,0}, bf16[128]{0}) tuple(%place, %layers)
  %known = (s32[]) while(%init), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %unknown = (s32[]) while(%init), condition=%condition, body=%body, metadata={op_name="jit(f)/F/while"}
  %in_place = (bf16[16,32]{1,0}, s8[1024]{0}) fusion(%a, %layers, %place), kind=kCustom, calls=%matmul_of_slice
  %z = bf16[16,32]{1,0} get-tuple-element(%in_place), index=0
  %active = bf16[16,32]{1,0} fusion(%z), kind=kLoop, calls=%activate
  %stored = bf16[8,16,32]{2,1,0} fusion(%buffer, %active, %place), kind=kLoop, calls=%store
  %turned = bf16[16,32]{0,1} copy(%active)
  ROOT %out = bf16[16,32]{1,0} bitcast(%turned)
}
"""
INDEX = 4  # bytes of an s32
LAYER, X, Y = 64 * 32 * 2, 16 * 64 * 2, 16 * 32 * 2  # bf16
KERNELS = {  # name: class, bytes read, bytes written
    "w": ("copy", LAYER + INDEX, LAYER),
    "product": ("matmul", X + LAYER, Y),
    "added": ("accumulation", 2 * Y + Y + INDEX, 2 * Y),  # the fp32 slice, the bf16 product
    "in_place": ("matmul", X + LAYER + INDEX, Y),
    "active": ("elementwise", Y, Y),
    "stored": ("stash", Y + INDEX, Y),
    "turned": ("copy", Y, Y),
}
RATES = Rates(
    matmul=1e12, attention=1e12, memory=1e9, host=1e6, network=1e5, host_size=8, stream=1e5, ragged=RAGGED_SHARE * 1e6,
    gap=1e-6, synchronisation=1e-3,
)  # fmt: skip
NEAR, FAR = (
    START + NVLINK_HOP,
    START + NETWORK_HOP,
)  # seconds before two devices of a host, or of two, have started to send


def test_a_kernel_counts_what_it_touches():
    modules, _ = computations(MODULE)
    found = {}
    for name in ("body", "main"):
        types = {line.name: line.type for line in modules[name]}
        for line in modules[name]:
            if kernel := kernel_of(line, types, modules):
                found[kernel.name] = (kernel.kind, kernel.read, kernel.written)
    assert found == KERNELS


def test_the_seconds_of_each_instruction_by_its_name_when_it_was_scheduled():
    """Kernels at 1 GB/s or 1 TFLOP/s and 1 us between them; of the gather's 512 bytes a rank sends half at 1 MB/s."""
    renamed = MODULE.replace("calls=%activate", 'calls=%activate, metadata={scheduling_name="gelu.1"}')
    found = seconds_by_name(renamed, {"F": 3}, RATES)
    gap, moved = 1e-6, {name: read + written for name, (_, read, written) in KERNELS.items()}
    for name in set(KERNELS) - {"active"}:
        assert found[name] == pytest.approx(moved[name] * 1e-9 + gap)
    assert found["gelu.1"] == pytest.approx(moved["active"] * 1e-9 + gap) and "active" not in found
    assert found["gather"] == pytest.approx(256e-6 + NEAR)
    # A turn: the slice, the gather, which outlasts the product, and the sum in place.
    turn = sum(found[name] for name in ("w", "gather", "added"))
    assert found["known"] == pytest.approx(5 * turn)
    assert found["unknown"] == pytest.approx(3 * turn + 4 * (found["less"] + RATES.synchronisation))
    assert not {"y", "gathered", "out", "init"} & set(found)
    assert account(renamed, {"F": 3}, RATES).scopes == {"F": pytest.approx(found["unknown"])}


SLICES = """HloModule m, is_scheduled=true

%rotate (p0: bf16[6,32,3,8], p1: s32[]) -> f32[32,1,8] {
  %p0 = bf16[6,32,3,8]{3,2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %qkv = bf16[1,32,3,8]{3,2,1,0} dynamic-slice(%p0, %p1, %zero, %zero, %zero), dynamic_slice_sizes={1,32,3,8}
  %flat = bf16[32,3,8]{2,1,0} bitcast(%qkv)
  %query = bf16[32,1,8]{2,1,0} slice(%flat), slice={[0:32], [0:1], [0:8]}
  ROOT %wide = f32[32,1,8]{2,1,0} convert(%query)
}

ENTRY %main (stash: bf16[6,32,3,8], place: s32[]) -> f32[32,1,8] {
  %stash = bf16[6,32,3,8]{3,2,1,0} parameter(0)
  %place = s32[] parameter(1)
  ROOT %one = f32[32,1,8]{2,1,0} fusion(%stash, %place), kind=kLoop, calls=%rotate
}
"""


def test_of_a_slice_that_is_sliced_again_the_second_is_read():
    modules, entry = computations(SLICES)
    (*_, line) = modules[entry]
    kernel = kernel_of(line, {other.name: other.type for other in modules[entry]}, modules)
    assert (kernel.read, kernel.written) == (32 * 8 * 2 + INDEX, 32 * 8 * 4)


ATTENTION = """HloModule m, is_scheduled=true

ENTRY %main (q: bf16[2,64,8,16], k: bf16[2,64,4,16]) -> bf16[2,64,8,16] {
  %q = bf16[2,64,8,16]{3,2,1,0} parameter(0)
  %k = bf16[2,64,4,16]{3,2,1,0} parameter(1)
  %first = s32[2,64]{1,0} constant({...})
  %one = (bf16[2,64,8,16]{3,2,1,0}, f32[2,8,64]{2,1,0}) custom-call(%q, %k, %k, %first), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/B/flash_attention_forward/pallas_call"}, backend_config={grid_x = 1 : i32, ir = "ML\\EFR\\0D(calls=%x)"}
  %two = (bf16[2,64,4,16]{3,2,1,0}, bf16[2,64,4,16]{3,2,1,0}) custom-call(%q, %k, %k, %q, %first), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/B/flash_attention_backward_key_value/pallas_call"}
  %three = (bf16[2,8,64,16]{3,1,2,0}, f32[2,8,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"sliding_window_length": 0}}
  %four = (bf16[2,8,64,16]{3,1,2,0}, f32[2,8,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config": {"sliding_window_length": 10}}
  %five = (bf16[2,64,8,16]{3,2,1,0}, f32[2,8,64]{2,1,0}, f32[2,8,64]{2,1,0}) custom-call(%q, %k, %k, %first), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/B/flash_attention_forward/vmap()/flash_attention_sm90/mpmd_map" scheduling_name="five" metadata_payload="tokamax:{\"mask\":{\"k_start\":null}}"}
  %q1 = bf16[128,8,16]{2,1,0} bitcast(%q)
  %k1 = bf16[64,8,16]{2,1,0} bitcast(%k)
  %six = bf16[128,8,16]{2,1,0} custom-call(%q1, %k1, %k1, %q1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/B/flash_attention_backward/vmap()/batched_body/mpmd_map"}
  %seven = (bf16[2,64,4,16]{3,2,1,0}, bf16[2,64,4,16]{3,2,1,0}) custom-call(%q, %k, %k, %q), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(f)/B/flash_attention_backward/vmap()/batched_body/mpmd_map"}
  ROOT %last = bf16[2,64,8,16]{3,2,1,0} get-tuple-element(%one), index=0
}
"""  # noqa: E501


def test_attention_kernels_are_priced_by_the_scores_that_causal_masks_and_windows_leave():
    modules, entry = computations(ATTENTION)
    types = {line.name: line.type for line in modules[entry]}
    kernels = [kernel_of(line, types, modules) for line in modules[entry] if line.op == "custom-call"]
    assert {kernel.kind for kernel in kernels} == {"attention"}
    product = 2 * 2 * 8 * 64 * 64 * 16  # of the whole square
    in_window = sum(min(row + 1, 10) for row in range(64)) / (64 * 65 / 2)
    want = [2 * product, 4 * product, 2 * product, 5 * product * in_window, 2 * product, 3 * product, 4 * product]
    assert [kernel.flops for kernel in kernels] == pytest.approx(want, rel=0.02)  # a diagonal counts as half here
    assert kernels[0].read == 2 * (2 * 64 * 16) * (8 + 4 + 4) + 4 * 2 * 64
    assert read(ATTENTION).kernels == {
        "flash_attention_forward": 2,  # in Triton and in Mosaic
        "flash_attention_backward": 2,
        "flash_attention_backward_key_value": 1,
        "__cudnn$fmhaSoftmax": 1,
        "__cudnn$fmhaSoftmaxBackward": 1,
    }


def test_products_of_values_have_the_values_size():
    """cuDNN's, with values of 8 elements for queries and keys of 16: one of a forward's two products, two of five."""
    text = ATTENTION.replace("constant({...})", "constant({...})\n  %v = bf16[2,64,4,8]{3,2,1,0} parameter(2)")
    text = re.sub(r"(%three|%four)(.*)\(%q, %k, %k\)(.*_length\": )\d+", r"\1\2(%q, %k, %v)\g<3>0", text)
    modules, entry = computations(text)
    types = {line.name: line.type for line in modules[entry]}
    kernels = {line.name: kernel_of(line, types, modules) for line in modules[entry] if line.op == "custom-call"}
    product = 2 * 2 * 8 * 64 * 64
    assert kernels["three"].flops == product * (16 + 8) and kernels["four"].flops == product * (3 * 16 + 2 * 8)
    assert kernels["three"].read == 2 * (2 * 64) * (8 * 16 + 4 * 16 + 4 * 8)


EXPERTS = r"""HloModule experts, is_scheduled=true

ENTRY %main (place: s32[1], up: bf16[6,24,16], slopes: bf16[24,8], shares: f32[24]) -> f32[24,1] {
  %place = s32[1]{0} parameter(0)
  %up = bf16[6,24,16]{2,1,0} parameter(1)
  %slopes = bf16[24,8]{1,0} parameter(2)
  %shares = f32[24]{0} parameter(3)
  ROOT %pallas_call.1 = (bf16[24,16]{1,0}, bf16[24,8]{1,0}, f32[24,1]{1,0}) custom-call(%place, %up, %slopes, %shares, %place), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/B/gated_rows_gradients/pallas_call"}
}
"""  # noqa: E501


def test_a_kernel_of_experts_rows_leaves_out_places_without_a_row():
    """It reads one part of the stack, and moves what the rows have that are there."""
    modules, entry = computations(EXPERTS)
    types = {line.name: line.type for line in modules[entry]}
    kernel = kernel_of(modules[entry][-1], types, modules)
    assert (kernel.kind, kernel.routed) == ("elementwise", True)
    assert (kernel.read, kernel.written) == (2 * 4 + 24 * (2 * 16 + 2 * 8 + 4), 24 * (2 * 16 + 2 * 8 + 4))
    half = dataclasses.replace(RATES, routed_part=0.5)
    assert account(EXPERTS, {}, half).read["elementwise"] == kernel.read / 2


INTO = r"""HloModule into, is_scheduled=true

ENTRY %main (rows: bf16[24,8], kernels: bf16[3,4,8,16], stash: bf16[6,1,24,16]) -> bf16[6,1,24,16] {
  %rows = bf16[24,8]{1,0} parameter(0)
  %kernels = bf16[3,4,8,16]{3,2,1,0} parameter(1)
  %stash = bf16[6,1,24,16]{3,2,1,0} parameter(2)
  ROOT %pallas_call.1 = bf16[6,1,24,16]{3,2,1,0} custom-call(%rows, %kernels, %stash), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/F/grouped_matmul_product/pallas_call"}
}
"""  # noqa: E501


def test_a_product_that_is_written_to_the_stash_does_not_read_it():
    modules, entry = computations(INTO)
    types = {line.name: line.type for line in modules[entry]}
    kernel = kernel_of(modules[entry][-1], types, modules)
    assert kernel.flops == 2 * 24 * 8 * 16
    assert (kernel.read, kernel.written) == (2 * (24 * 8 + 4 * 8 * 16), 2 * 24 * 16)


def test_times_of_known_and_dynamic_loops():
    """Five iterations of one loop, three of the other: the body's kernels run eight times."""
    one, bodies = account(MODULE, {"F": 3}, RATES), 8
    assert one.flops["matmul"] == (bodies + 1) * 2 * 16 * 64 * 32
    assert one.kernels == {
        "copy": bodies + 1,
        "matmul": bodies + 1,
        "accumulation": bodies,
        "elementwise": 1 + 4,
        "stash": 1,
    }
    assert one.synchronisations == 3 + 1  # of the dynamic loop: before each iteration, and at its end
    assert one.seconds[SYNCS] == pytest.approx(4e-3)
    assert one.seconds[GAPS] == pytest.approx(sum(one.kernels.values()) * 1e-6)
    assert one.read["accumulation"] + one.written["accumulation"] == bodies * (5 * Y + INDEX)
    # All kernels here are bound by memory: 1 GB/s.
    assert one.seconds["matmul"] == pytest.approx((bodies * (X + LAYER + Y) + X + LAYER + INDEX + Y) / 1e9)


def test_a_second_counter_agrees():
    """`hlo_counter` shares no code with the account; tests/benchmarks/test_roofline.py compares them on whole steps."""
    one, second = account(MODULE, {"F": 3}, RATES), Counter(MODULE, {"F": 3}, {})
    assert second.bytes == sum(one.read.values()) + sum(one.written.values())
    assert second.flops == sum(one.flops.values())
    assert second.kernels == sum(one.kernels.values())
    assert second.syncs == one.synchronisations


def test_a_collective_is_exposed_by_what_kernels_do_not_cover():
    """The gather sends 256 bytes to the host's other GPU at 1 MB/s, beside a matmul."""
    one = account(MODULE, {"F": 3}, RATES)
    takes, beside = 256 / 1e6 + NEAR, (X + LAYER + Y) / 1e9 + 1e-6
    assert one.seconds[EXPOSED] == pytest.approx(8 * (takes - beside))
    assert one.hidden["all-gather"] == pytest.approx(8 * beside)
    far = account(MODULE.replace("{{0,1}}", "{{0,8}}"), {"F": 3}, RATES)
    assert far.seconds[EXPOSED] == pytest.approx(8 * (256 / 1e5 + FAR - beside))


def test_the_axis_order_says_which_devices_share_a_host():
    """Devices 0 and 1 of the program are 0 and 8 of the cluster, in two hosts."""
    places = mesh_places(ParallelConfig(data=8, pipe=2, axis_order=("pipe", "data", "tensor")))
    near, far = account(MODULE, {"F": 3}, RATES), account(MODULE, {"F": 3}, RATES, places)
    assert far == account(MODULE.replace("{{0,1}}", "{{0,8}}"), {"F": 3}, RATES) != near


EXCHANGE = """HloModule step, is_scheduled=true

ENTRY %step (x: bf16[16,1000], n: s32[16]) -> bf16[16,1000] {
  %x = bf16[16,1000]{1,0} parameter(0)
  %n = s32[16]{0} parameter(1)
  ROOT %back = bf16[16,1000]{1,0} ALL-TO-ALL, replica_groups=[1,16]<=[16]
}
"""
DENSE = EXCHANGE.replace("ALL-TO-ALL", "all-to-all(%x), dimensions={0}")
RAGGED = EXCHANGE.replace("ALL-TO-ALL", "ragged-all-to-all(%x, %x, %n, %n, %n, /*index=5*/%n)")


def test_an_all_to_all_takes_each_device_s_own_adapter_to_other_hosts():
    """Each of 16 devices has 2,000 bytes for each other one: for seven in its host at 1 MB/s, for eight at 0.1 MB/s."""
    assert account(DENSE, {}, RATES).seconds[EXPOSED] == pytest.approx(8 * 2000 / 1e5 + FAR)
    ragged = dataclasses.replace(RATES, ragged_part=0.25)
    assert account(RAGGED, {}, ragged).seconds[EXPOSED] == pytest.approx(
        7 * 500 / (RAGGED_SHARE * 1e6) + 16 * RAGGED_PEER + FAR
    )


def test_rates_of_an_h100():
    """What an H200's kernels reached: 450 TFLOP/s of causal attention with 8,192 tokens, 200 with 1,024 and heads of 64."""
    rates = rates_of(find_gpu("h100-80gb"), "bf16")
    assert rates.matmul == pytest.approx(706e12, rel=0.01)
    assert rates.attention_rate(True, 4096, 128) == pytest.approx(450e12, rel=0.04)
    assert rates.attention_rate(True, 512, 64) == pytest.approx(200e12, rel=0.01)
    assert rates.memory == pytest.approx(0.75 * 3.35e12, rel=0.01)


BRANCHED = """HloModule step, is_scheduled=true

%work (a: bf16[1000]) -> bf16[1000] {
  %a = bf16[1000]{0} parameter(0)
  ROOT %tanh = bf16[1000]{0} tanh(%a)
}

%nothing (b: bf16[1000]) -> bf16[1000] {
  ROOT %b = bf16[1000]{0} parameter(0)
}

ENTRY %step (index: s32[], x: bf16[1000]) -> bf16[1000] {
  %index = s32[] parameter(0)
  %x = bf16[1000]{0} parameter(1)
  %send = (bf16[1000]{0}, bf16[1000]{0}) collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1}}
  %again = (bf16[1000]{0}, bf16[1000]{0}) collective-permute-start(%x), channel_id=2, source_target_pairs={{1,0}}
  %chosen = bf16[1000]{0} conditional(%index, %x, %x), branch_computations={%work, %nothing}, \
metadata={op_name="jit(step)/head/cond"}
  %second = bf16[1000]{0} collective-permute-done(%again)
  ROOT %first = bf16[1000]{0} collective-permute-done(%send)
}
"""


@pytest.mark.parametrize("runs", [0.0, 0.25, 1.0])
def test_a_conditional_hides_a_collective_only_when_it_does_something(runs):
    """Two sends of 2,000 bytes at 1 MB/s, one after the other, beside a branch of 4,000 bytes at 1 GB/s."""
    rates = dataclasses.replace(RATES, synchronisation=25e-6)
    one = account(BRANCHED, {"head/cond": runs}, rates)
    sends, branch = 2 * (2000 / 1e6 + NEAR), 4000 / 1e9 + 1e-6
    assert one.exposed["collective-permute"] == pytest.approx(sends - 25e-6 - runs * branch)
    assert one.exposed["collective-permute"] == pytest.approx(one.seconds[EXPOSED])
    assert one.hidden["collective-permute"] == pytest.approx(25e-6 + runs * branch)


def test_a_collective_ends_where_its_own_start_is_named():
    """XLA numbers the starts of one kind: the name of one is the beginning of another's."""
    assert account(BRANCHED.replace("%again", "%send.1"), {"head/cond": 0.5}, RATES) == account(
        BRANCHED, {"head/cond": 0.5}, RATES
    )


def test_what_a_long_branch_hides_in_half_of_its_executions():
    """The branch takes longer than both sends: half of their time is exposed, not what the average branch leaves."""
    long = BRANCHED.replace("%tanh = bf16[1000]{0} tanh(%a)", "%tanh = bf16[10000000]{0} broadcast(%a)")
    one = account(long, {"head/cond": 0.5}, dataclasses.replace(RATES, synchronisation=0.0))
    sends = 2 * (2000 / 1e6 + NEAR)
    assert one.hidden["collective-permute"] == pytest.approx(sends / 2)
