"""A model of one's own whose step would hang is refused before it runs, with the operation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from jax import lax
from jax.sharding import PartitionSpec as P

from megajax.config import ConfigError, ParallelConfig, RunConfig, TrainConfig
from megajax.estimate.branch_permutes import StagePermute, stage_permutes
from megajax.models.gpt import GPT
from megajax.models.interface import ModelContext, mean_loss
from megajax.models.nnx_model import NNXModel, named_key, parameter
from megajax.runtime.mesh import make_mesh
from megajax.train.deadlocks import Checked, with_check
from megajax.train.step import make_training
from tests import small

LENGTH, WIDTH, ROWS, SAMPLES = 8, 6, 32, 8
RESIDUAL = ("batch", "sequence", "hidden")

# In a block, on x [b, s, h] whose sequence tensor splits.
IN_A_BLOCK = {
    "roll": lambda x: jnp.roll(x, 1, axis=1),
    "token shift": lambda x: jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1),
    "pad": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "flip": lambda x: jnp.flip(x, 1),
    "split": lambda x: jnp.concatenate(jnp.split(x, [3], axis=1)[::-1], axis=1),
    "update": lambda x: x.at[:, 2:5].multiply(2.0),
}


def summed_on_one_rank(x):
    """A sum over tensor that only its first rank asks for: a fault on any mesh with tensor."""

    def local(x):
        own = lax.axis_index("tensor") == 0
        return lax.cond(own, lambda x: x + lax.psum(x, "tensor"), lambda x: x + x, x)

    spec = P(None, "tensor")
    return jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names={"tensor"}, check_vma=False)(
        lax.stop_gradient(x)
    )


OPERATIONS = IN_A_BLOCK | {"summed on one rank": summed_on_one_rank}


@struct.dataclass
class MovingConfig:
    name: str = "moving"
    layers: int = 2
    block: str = ""
    ends: str = ""
    whole: bool = False


class MovingBlock(nnx.Module):
    def __init__(self, config, key, context):
        self.config, self.context, self.constrain = config, context, context.constrain
        self.up = parameter(jax.random.normal(named_key(key, "up"), (WIDTH, 16)) / 3, "hidden", "feedforward")
        self.down = parameter(jax.random.normal(named_key(key, "down"), (16, WIDTH)) / 3, "feedforward", "hidden")

    def __call__(self, x, microbatch, layer):
        x = self.constrain(x, *RESIDUAL)
        if self.config.block:
            whole = self.context.whole if self.config.whole else lambda x: x
            x = self.constrain(x + jnp.tanh(whole(OPERATIONS[self.config.block](whole(x)))), *RESIDUAL)
        y = self.constrain(x, "batch", "whole_sequence", "hidden")
        inner = self.constrain(jnp.tanh(y @ self.up[...]), "batch", "whole_sequence", "feedforward")
        return self.constrain(x + inner @ self.down[...], *RESIDUAL)


class MovingEnds(nnx.Module):
    def __init__(self, config, key, context):
        self.config, self.constrain = config, context.constrain
        self.whole = context.whole if config.whole else lambda x: x
        self.table = parameter(jax.random.normal(named_key(key, "table"), (ROWS, WIDTH)), "vocabulary", "hidden")
        self.token = parameter(jnp.ones((1, WIDTH)), None, "hidden")

    def embed(self, microbatch):
        x = self.constrain(microbatch["x"], *RESIDUAL)
        if self.config.ends == "class token":
            token = jnp.broadcast_to(self.token[...], (len(x), 1, WIDTH))
            x = self.constrain(self.whole(jnp.concatenate([token, self.whole(x)[:, 1:]], axis=1)), *RESIDUAL)
        return x

    def head_loss(self, y, microbatch):
        y = self.constrain(y, *RESIDUAL)
        if self.config.ends == "tokens":
            return jnp.square(self.whole(self.whole(y)[:, 1:]) - microbatch["y"][:, 1:]).sum()
        y = self.constrain(y, "batch", "whole_sequence", "hidden")
        logits = self.constrain(y @ self.table[...].T, "batch", "whole_sequence", "vocabulary")
        if self.config.ends == "vocabulary":
            logits = self.whole(self.whole(logits)[..., :29])
        return jnp.square(y - microbatch["y"]).sum() + jax.nn.logsumexp(logits, -1).sum()


class Moving(NNXModel):
    block_module, shared_module, activation_axes = MovingBlock, MovingEnds, RESIDUAL

    def batch_shapes(self):
        return {name: jax.ShapeDtypeStruct((LENGTH, WIDTH), np.float32) for name in ("x", "y")}


def training_of(schedule="1f1b", chunks=1, pipe=2, **fields):
    parallel = ParallelConfig(pipe=pipe, tensor=2, schedule=schedule, chunks=chunks, microbatch_size=2)
    train = TrainConfig(global_batch_size=SAMPLES, steps=2, warmup_steps=1, precision="fp32")
    run = RunConfig(MovingConfig(layers=2 * chunks, **fields), parallel, train)
    run.validate()
    return make_training(run, make_mesh(parallel), Moving)


CASES = [{"block": name} for name in IN_A_BLOCK] + [{"ends": name} for name in ("class token", "tokens", "vocabulary")]
PART = {"class token": "embed", "tokens": "head_loss", "vocabulary": "head_loss"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case != {"block": "update"}], ids=str)  # XLA masks it
def test_what_would_hang_is_refused_before_it_runs(case):
    training = training_of(**case)
    part = PART.get(case.get("ends"), "block")
    message = (
        rf"\w+ in {part} of Moving \(.*{__name__.rpartition('.')[2]}.py, line \d+\) is along an axis .* context.whole"
    )
    with pytest.raises(ConfigError, match=message):
        training.compile_train_step(*training.step_shapes())


@pytest.mark.parametrize("pipe", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_other_collectives_that_would_hang_are_refused_before_they_run(pipe):
    training = training_of(pipe=pipe, block="summed on one rank")
    with pytest.raises(ConfigError, match="the program of Moving would hang; collectives: DEADLOCK.*all-reduce.*cond"):
        training.compile_train_step(*training.step_shapes())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule", "chunks"),
    [(case, "1f1b", 1) for case in CASES]
    + [
        ({"block": "token shift", "ends": "class token"}, name, chunks)
        for name, chunks in (("interleaved_1f1b", 2), ("zb_v", 2), ("dualpipe_v", 2))
    ],
    ids=str,
)
def test_with_whole_operands_it_runs_and_is_right(case, schedule, chunks):
    training = training_of(schedule, chunks, whole=True, **case)
    x, y = np.random.default_rng(3).normal(size=(2, 4, 2, LENGTH, WIDTH)).astype(np.float32)
    model = Moving(training.run.model, ModelContext(recompute="none"))
    params = jax.device_get(jax.jit(model.init)(jax.random.key(1)))
    loss, gradients = training.loss_and_gradients(small.place(training, params), {"x": x, "y": y})
    want, slopes = jax.jit(jax.value_and_grad(functools.partial(mean_loss, model)))(params, {"x": x, "y": y})
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), jax.device_get(slopes), rtol=1e-5)


PROGRAM = """
FileNames
1 "/site-packages/jax/roll.py"
2 "/home/me/model.py"

FunctionNames
1 "f"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=3 end_line=3 column=5 end_column=5}}
2 {{file_name_id=2 function_name_id=1 line=34 end_line=34 column=5 end_column=5}}

StackFrames
1 {{file_location_id=2 parent_frame_id=1}}
2 {{file_location_id=1 parent_frame_id=1}}

%work (state: f32[8]) -> f32[8] {{
  %state = f32[8] parameter(0)
  ROOT %move = f32[8] {op}(%state), channel_id=1, source_target_pairs={pairs}, metadata={{op_name="{name}" stack_frame_id=2}}
}}

%nothing (state: f32[8]) -> f32[8] {{
  ROOT %state = f32[8] parameter(0)
}}

ENTRY %main (x: f32[8], on: pred[]) -> f32[8] {{
  %x = f32[8] parameter(0)
  %on = pred[] parameter(1)
  ROOT %result = f32[8] {call}
}}
"""
BRANCH = "conditional(%on, %x, %x), true_computation=%work, false_computation=%nothing"
STAGES = [0, 0, 1, 1]


def program(op="collective-permute", pairs="{{0,1},{2,3}}", name="jit(step)/head/concatenate", call=BRANCH):
    return PROGRAM.format(op=op, pairs=pairs, name=name, call=call)


@pytest.mark.parametrize("op", ["collective-permute", "collective-permute-start"])
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("jit(step)/head/concatenate", "head_loss"),
        ("a/F/embed/pad", "embed"),
        ("a/embed_backward/x/pad", "embed"),
        ("a/F/while/pad", "block"),
    ],
)
def test_a_permute_within_a_stage_in_a_branch_is_found(op, name, part):
    assert stage_permutes(program(op, name=name), STAGES) == [
        StagePermute(name.rpartition("/")[2], part, "/home/me/model.py, line 34")
    ]


def test_older_programs_have_the_place_in_each_line():
    text = program().replace("stack_frame_id=2", 'source_file="/home/me/model.py" source_end_line=9 source_line=7')
    assert stage_permutes(text, STAGES)[0].source == "/home/me/model.py, line 7"
    assert stage_permutes(program().replace("stack_frame_id=2", ""), STAGES)[0].source == ""


@pytest.mark.parametrize(
    "text",
    [
        program(pairs="{{0,2},{1,3}}"),  # from stage to stage
        program(pairs="{{0,1},{1,2}}"),
        program(op="all-gather"),
        program(call="call(%x), to_apply=%work"),  # on all stages
        program(call="fusion(%x), calls=%nothing"),
    ],
)
def test_other_collectives_are_legal(text):
    assert stage_permutes(text, STAGES) == []


def test_models_of_ones_own_are_checked_on_any_mesh_of_several_devices():
    parallel, function = ParallelConfig(pipe=2, tensor=2), jax.jit(jnp.sin)
    mesh = make_mesh(parallel)
    assert isinstance(with_check(function, Moving, parallel, mesh), Checked)

    class OwnBlock(GPT):
        block_module = MovingBlock

    assert isinstance(with_check(function, OwnBlock, parallel, mesh), Checked)
    assert with_check(function, GPT, parallel, mesh) is function
    for sizes in ({"pipe": 4}, {"tensor": 4}, {"pipe": 2, "tensor": 2, "tensor_overlap": "ring"}):
        assert isinstance(with_check(function, Moving, ParallelConfig(**sizes), mesh), Checked)
    assert with_check(function, Moving, ParallelConfig(), mesh) is function


def test_a_checked_function_is_compiled_once_for_each_set_of_shapes():
    seen = []
    function = Checked(
        jax.jit(lambda x, y, double: 2 * (x + y) if double else x + y, static_argnums=2), seen.append, (2,)
    )
    assert function(np.float32(1), np.float32(2), True) == 6 and function(np.float32(3), np.float32(2), True) == 10
    assert function(np.float32(1), np.float32(2), False) == 3 and len(seen) == 2
    assert (function(np.ones(3), np.ones(3), False) == 2).all() and len(seen) == 3
    refusing = Checked(jax.jit(jnp.sin), lambda text: pytest.fail("checked"))
    with pytest.raises(pytest.fail.Exception, match="checked"):
        refusing(np.float32(1))
