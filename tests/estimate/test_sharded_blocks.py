"""Exposed collectives of ZeRO-3, by hand: which kernels each overlaps."""

import dataclasses

import pytest

from megajax.config import ParallelConfig, RunConfig, TrainConfig, preset
from megajax.estimate.gpus import find_gpu
from megajax.estimate.program_time import Program
from megajax.estimate.sharded_blocks import Passes, Timeline, backward_exposed, forward_exposed, merged_exposed

# Four matmuls, of a second each, two for gradients of weights; a gather of a weight takes three, a scatter six.
ONE = Passes(
    outputs=[1.0] * 4,
    inputs=[1.0] * 4,
    weights=[2.0] * 4,
    gathers=[3.0] * 4,
    scatters=[6.0] * 4,
    other_gathers=2.0,
    other_scatters=1.0,
    attention=(4.0, 8.0),
    traffic=2.0,
    ring=((0.0, 0.0), (0.0, 0.0)),
    exchange=((0.0, 0.0), (0.0, 0.0)),
    tensor=0.0,
    gated=False,
    biased=False,
    full=False,
    hopper=True,
)


def test_a_timeline_runs_one_collective_at_a_time():
    line = Timeline()
    first, second = line.start(3.0), line.start(2.0)
    line.run(4.0)
    line.wait(first)
    assert line.exposed == 0
    line.wait(second)
    assert (line.exposed, line.now) == (1, 5)


def test_the_first_weight_of_a_forward_is_exposed_and_others_as_far_as_kernels_do_not_hide_them():
    # 1 + 3 at the start. Then 1 + 4 + 1 s of kernels, the second matmul, 3 after the second weight is there; the third
    # weight comes at 6: no wait. The fourth is there at 9, the third matmul and the rest of the traffic end at 9.
    assert forward_exposed(ONE) == 4
    # The last weight before the widest: that one is there at 9, when 7 s of kernels have run.
    assert forward_exposed(ONE._replace(gated=True)) == 4 + 2
    assert forward_exposed(ONE._replace(gated=True, biased=True)) == 4


def test_gradients_are_scattered_after_their_matmuls():
    # Selective: the last weight at the start, 3 less half a second of traffic; the third weight, 3 s later, waits for 1.5 s
    # after the 2 s of kernels before; the second, 3 s later, for 2 s after its matmul; then 8 s of attention. Four scatters
    # of 6 s, the first after 2 of 8 s of matmuls, and a second for the other arrays.
    assert backward_exposed(ONE) == pytest.approx(2.5 + 1 + 2 + (2 + 4 * 6 + 1 - 8))
    # Full recomputation has the forward's instead, in its order.
    full = ONE._replace(full=True)
    assert backward_exposed(full) == pytest.approx(forward_exposed(ONE) + (2 + 4 * 6 + 1 - 8))
    # With biases, not on Hopper: the last weight is there at 3, beside its gradient's matmul and half a second of traffic;
    # the third one, at 9, waits 4 s after the two seconds behind the last. That gradient's scatter, and the gathers that
    # are left, end at 20, when kernels do. Then three matmuls of 2 s and three scatters, which end 14 s later, and others'.
    biased = ONE._replace(gated=True, biased=True, hopper=False)
    assert backward_exposed(biased) == pytest.approx(0.5 + 4 + 14 + 1)
    # Nothing to compute: everything is exposed.
    none = dict.fromkeys(("outputs", "inputs", "weights"), [0.0] * 4) | {"attention": (0.0, 0.0), "traffic": 0.0}
    everything = 4 * 3 + 2 + 4 * 6 + 1
    assert backward_exposed(ONE._replace(**none)) == backward_exposed(full._replace(**none)) == everything
    assert merged_exposed(ONE._replace(**none)) == everything + 4 * 3 + 2


def test_sends_round_a_ring_wait_for_the_gathers_before_them():
    # A forward's gathers end 14 s after its start, and 2 s of sends 2 s later. Kernels have waited 4 s for the first weight,
    # run for 2 s before attention, and for 1 s beside the sends: they wait for 9 s more.
    assert forward_exposed(ONE._replace(ring=((2.0, 1.0), (0.0, 0.0)))) == 4 + 9
    # A backward waits for 2.5 + 1 + 2 s as without a ring. Sends end before attention does. Then the last gradient, whose
    # scatter takes 6 s, in which nothing runs. Three matmuls of 2 s are left, and 3 * 6 + 1 s of scatters after the first.
    ring = ONE._replace(ring=((0.0, 0.0), (1.0, 8.0)))
    assert backward_exposed(ring) == pytest.approx(2.5 + 1 + 2 + 6 + (2 + 3 * 6 + 1 - 6))


def test_merged_passes_gather_the_mlps_of_the_backward_then_attentions_then_the_forwards():
    # The last two weights, after half a second of traffic each, 2.5 and 1.5 s. Of attention the forward's first weight, with
    # others', 5 s; the other three, 11 s, of which 5 of kernels hide 6. The forward's MLP, 6 s beside 3 of kernels. Four
    # scatters: the first ends 2 s after 4 of kernels, three more behind it, and others': 15 s after the last matmul.
    assert merged_exposed(ONE) == pytest.approx(2.5 + 1.5 + 5 + 6 + 3 + 15)


def test_what_waits_for_an_exchange_for_heads():
    # A forward waits 4 s for the first weight, then 1 s for the exchange behind 2 s of kernels; 4 s of attention, and the
    # exchange of its output from 11 to 13, where the gathers start: at 16, 19, 22, and others' at 23. The second, third and
    # fourth matmul wait 5, 2 and 1 s (a second of traffic before the last), the end 0 s.
    exchanged = ONE._replace(exchange=((1.0, 2.0), (1.0, 2.0)))
    assert forward_exposed(exchanged) == pytest.approx(4 + 1 + 2 + 3 + 2 + 1)
    # A backward until attention as without: the third weight's, the second's. The last gradient's matmul, of 2 s, beside the
    # exchange that waits for the first weight's and others' gathers, 3 s more. The scatter takes 6 s of attention's 8; then
    # the second exchange.
    assert backward_exposed(exchanged) == pytest.approx(2.5 + 1 + 2 + 3 + 2 + (2 + 3 * 6 + 1 - 6))


def test_tensor_parallel_matmuls_wait_for_gathers_pair_by_pair():
    # A gather over the tensor group takes half a second. Half of others' gathers, it, and the weight: 4.5 s. A second of
    # matmul, 4 of attention, a half of traffic: the second weight is there. Half a second to scatter. The second pair: 4.5 s
    # again; the fourth weight is there 3 s later, after 1.5 s. The last scatter is not in it.
    split = ONE._replace(tensor=0.5)
    assert forward_exposed(split) == pytest.approx(4.5 + 0.5 + 4.5 + 1.5)
    # A backward: the last weight at 3.5, the third at 6.5, and half of others' gathers behind the scatter at 8; the second
    # one at 13. All of the last gradient's scatter. The gather over the tensor group for the third gradient waits for the
    # second's scatter, 4.5 s. The third's and the first's scatters, and others', end 11 s after the last matmul.
    assert backward_exposed(split) == pytest.approx(3 + 1.5 + 1.5 + 3 + 6 + 4.5 + 11)


def test_slow_links_expose_more_than_their_share():
    """As compiled, Llama 2 7B with ZeRO-3 on L40S waits for half of the step, on H100s for an eighth."""
    exposed = []
    for name in ("l40s", "h100-80gb"):
        layout = ParallelConfig(data=8, zero=3, attention="cudnn")
        run = RunConfig(preset("llama2-7b"), layout, TrainConfig(global_batch_size=16))
        parts = Program(run, find_gpu(name)).parts
        exposed.append(parts.data / parts.total)
    assert 0.5 < exposed[0] < 0.6 and 0.1 < exposed[1] < 0.15
    one_replica = run.with_layout(data=1, zero=0)
    one_replica = dataclasses.replace(one_replica, train=TrainConfig(global_batch_size=2))
    assert Program(one_replica, find_gpu("l40s")).parts.data == 0
