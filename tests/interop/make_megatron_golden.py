"""Writes the golden checkpoints of tests/interop/test_megatron*.py: tiny random GPTs of megatron-core, and their logits.

python tests/interop/make_megatron_golden.py      in an environment with megatron-core, on CPUs; the files are from
                                                  megatron-core 0.16.1 and torch 2.15.0

golden/megatron.zip has for each of CASES a directory as Megatron-LM's --save writes it: latest_checkpointed_iteration.txt
and iter_0000007/, with bf16 weights and, as an optimizer state, one tensor. One process draws all parameters and computes
the logits of `make_golden.tokens()` in fp32, golden/megatron/CASE.npy [2, 16, 64]; the processes of the case's layout then
load its torch_dist checkpoint with megatron-core, which shards it, and save their own.
golden/megatron/rotary.npz has the weights of that case by their names in torch_dist, for tests without torch.
"""

import argparse
import contextlib
import dataclasses
import os
import pathlib
import sys
import tempfile
import types
import zipfile

import numpy as np

sys.path.append(str(pathlib.Path(__file__).parents[2]))

from tests.interop.make_golden import GOLDEN, LENGTH, VOCABULARY, tokens

DIRECTORY, ARCHIVE = GOLDEN / "megatron", GOLDEN / "megatron.zip"
ITERATION = 7
SIZES = dict(num_layers=4, hidden_size=16, num_attention_heads=4, kv_channels=4, ffn_hidden_size=24)
ARGUMENTS = dict(
    seq_length=LENGTH,
    max_position_embeddings=24,
    make_vocab_size_divisible_by=48,
    tensor_model_parallel_size=2,
    padded_vocab_size=96,
    position_embedding_type="learned_absolute",
    rotary_base=10000,
    rotary_percent=1.0,
    use_rope_scaling=False,
    swiglu=False,
    squared_relu=False,
    bias_gelu_fusion=True,
    bias_swiglu_fusion=True,
    untie_embeddings_and_output_weights=False,
    apply_layernorm_1p=False,
    group_query_attention=False,
    num_query_groups=1,
    normalization="LayerNorm",
    layernorm_epsilon=1e-5,
    add_bias_linear=True,
    add_qkv_bias=False,
    qk_layernorm=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    num_experts=None,
    multi_latent_attention=False,
    tokenizer_type="HuggingFaceTokenizer",
)
ROTARY = dict(
    normalization="RMSNorm",
    swiglu=True,
    position_embedding_type="rope",
    rotary_base=100,
    untie_embeddings_and_output_weights=True,
    add_bias_linear=False,
    group_query_attention=True,
    num_query_groups=2,
    layernorm_epsilon=1e-6,
)
YARN = dict(
    position_embedding_type="yarn",
    rotary_base=100,
    yarn_rotary_scaling_factor=4.0,
    yarn_original_max_position_embeddings=16,
    yarn_beta_fast=2.0,
    yarn_beta_slow=0.5,
    yarn_mscale=1.0,
    yarn_mscale_all_dim=0.5,
    yarn_correction_range_round_to_int=True,
    gated_linear_unit=True,
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and how its checkpoint is written.

    Attributes:
      arguments: what differs from ARGUMENTS.
      format: "torch" (mp_rank_XX) or "torch_dist".
      pipe: ranks of the pipeline; there are always 2 of tensor parallelism.
      chunks: virtual stages of a rank.
      layers: of the first stage, if stages are uneven.
      metadata: of megatron-core's sharded_state_dict.
    """

    arguments: dict
    format: str = "torch"
    pipe: int = 1
    chunks: int | None = None
    first: int | None = None
    metadata: dict | None = None


CASES = {
    "gpt": Case({}, pipe=2, chunks=2),
    "rotary": Case(ROTARY, "torch_dist", pipe=2),
    "uneven": Case(ROTARY | dict(rotary_percent=0.5, qk_layernorm=True, add_qkv_bias=True), pipe=2, first=3),
    "layers": Case(
        ROTARY | dict(use_rope_scaling=True, rotary_base=50000, kv_channels=8),
        "torch_dist",
        metadata={"singleton_local_shards": True},
    ),
    "yarn": Case(YARN),
    "no_biases": Case(dict(add_bias_linear=False, bias_gelu_fusion=False, window_size=(5, 0)), "torch_dist"),
}


def arguments_of(case: Case) -> argparse.Namespace:
    """The arguments that Megatron-LM would store."""
    layout = dict(
        pipeline_model_parallel_size=case.pipe,
        virtual_pipeline_model_parallel_size=case.chunks,
        decoder_first_pipeline_num_layers=case.first,
    )
    return argparse.Namespace(**SIZES | ARGUMENTS | layout | case.arguments)


def chunks_of(args, tensor: int, pipe: int) -> list:
    """This process's parts of the model, by megatron-core; one process with tensor = pipe = 1 has all of it."""
    import torch.nn.functional as F
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    named = {field.name for field in dataclasses.fields(TransformerConfig)}
    settings = {name: value for name, value in vars(args).items() if name in named}
    chunks = args.virtual_pipeline_model_parallel_size if pipe > 1 else None
    config = TransformerConfig(
        **settings
        | dict(
            tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=pipe,
            virtual_pipeline_model_parallel_size=chunks,
            num_layers_in_first_pipeline_stage=args.decoder_first_pipeline_num_layers if pipe > 1 else None,
            num_query_groups=args.num_query_groups if args.group_query_attention else None,
            gated_linear_unit=args.swiglu or getattr(args, "gated_linear_unit", False),
            activation_func=F.silu if args.swiglu else F.gelu,
            bias_activation_fusion=args.bias_swiglu_fusion if args.swiglu else args.bias_gelu_fusion,
            use_cpu_initialization=True,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            pipeline_dtype=__import__("torch").float32,
        )
    )
    for name in YARN:  # which megatron-core reads from its configuration, and 0.16.1 does not declare
        if name.startswith("yarn_") and hasattr(args, name):
            setattr(config, name, getattr(args, name))
    found = []
    for chunk in range(chunks or 1):
        stage = chunk if chunks else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        found.append(
            GPTModel(
                config,
                get_gpt_layer_local_spec(qk_layernorm=args.qk_layernorm, normalization=args.normalization),
                args.padded_vocab_size,
                args.max_position_embeddings,
                pre_process=first,
                post_process=last,
                parallel_output=False,
                share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
                position_embedding_type=args.position_embedding_type,
                rotary_percent=args.rotary_percent,
                rotary_base=args.rotary_base,
                rope_scaling=args.use_rope_scaling,
                vp_stage=stage,
            )
        )
    return found


def sharded(models, metadata, args) -> dict:
    """The state as Megatron-LM passes it to megatron-core's dist_checkpointing."""
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    for number, model in enumerate(models):
        state[f"model{number}" if len(models) > 1 else "model"] = model.sharded_state_dict(metadata=metadata)
    return state


def draw(model) -> None:
    """Random parameters that bf16 stores exactly."""
    import torch

    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "layernorm.weight" in name
            parameter.copy_((1 + 0.2 * noise if is_scale else 0.25 * noise).bfloat16())


def process(rank: int, world: int, port: int, name: str, work: str) -> None:
    """One process: draws, computes and saves if it is alone; loads and saves its shard if not."""
    os.environ |= dict(MASTER_ADDR="localhost", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    import torch
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    torch.cuda.synchronize, ones = lambda: None, torch.ones
    torch.ones = lambda *sizes, device=None, **more: ones(*sizes, **more)  # of the window's mask
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.cuda.current_device = lambda: "cpu"  # megatron-core moves rotary frequencies to it
    tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)  # of dropout
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    case, args = CASES[name], arguments_of(CASES[name])
    tensor, pipe = (1, 1) if world == 1 else (2, case.pipe)
    chunks = args.virtual_pipeline_model_parallel_size if world > 1 else None
    parallel_state.initialize_model_parallel(tensor, pipe, chunks)
    models = chunks_of(args, tensor, pipe)
    whole, final = pathlib.Path(work, "whole"), pathlib.Path(work, name)
    if world == 1:
        draw(models[0])
        ids = torch.from_numpy(tokens())
        positions = torch.arange(LENGTH)[None].expand(ids.shape)
        mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
        models[0].eval()
        with torch.no_grad():
            logits = models[0](ids, positions, mask)
        np.save(DIRECTORY / f"{name}.npy", logits.float().numpy()[..., :VOCABULARY])
        if name == "rotary":
            write_arrays(models[0])
        whole.mkdir()
        dist_checkpointing.save(sharded(models, None, args), whole)
        return
    loaded = dist_checkpointing.load(sharded(models, None, args), whole)
    for number, model in enumerate(models):
        model.load_state_dict(loaded[f"model{number}" if len(models) > 1 else "model"])
        model.bfloat16()
    directory = final / f"iter_{ITERATION:07d}"
    if rank == 0:
        directory.mkdir(parents=True)
        (final / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))
    torch.distributed.barrier()
    if case.format == "torch_dist":
        dist_checkpointing.save(sharded(models, case.metadata, args), directory)
        return
    ranks = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    ranks += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}" if pipe > 1 else ""
    (directory / ranks).mkdir()
    state = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION, "optimizer": {"state": torch.zeros(3)}}
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    args.model_type, args.attention_backend = ModelType.encoder_or_decoder, AttnBackend.auto
    state["rng_state"] = [{"np_rng_state": np.random.get_state(), "random_rng_state": (3, (1, 2), None)}]
    for number, model in enumerate(models):
        saved = model.state_dict_for_save_checkpoint()
        copies = {key: value.clone() if torch.is_tensor(value) else value for key, value in saved.items()}
        state[f"model{number}" if len(models) > 1 else "model"] = copies
    torch.save(state, directory / ranks / "model_optim_rng.pt")


def write_arrays(model) -> None:
    """The weights as bf16's bits by the names of a torch_dist checkpoint, with an axis of layers."""
    import torch

    found = {}
    for value in model.sharded_state_dict().values():
        for part in value.build() if hasattr(value, "build") else [value]:
            if not torch.is_tensor(getattr(part, "data", None)):
                continue
            bits = part.data.detach().bfloat16().view(torch.int16).numpy()
            array = found.setdefault(part.key, np.zeros(part.global_shape, np.int16))
            sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
            array[tuple(slice(a, a + size) for a, size in zip(part.global_offset, sizes, strict=True))] = bits
    np.savez_compressed(DIRECTORY / "rotary.npz", **found)


def main() -> None:
    """Writes everything."""
    import torch

    DIRECTORY.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, case) in enumerate(CASES.items()):
            work = pathlib.Path(temporary, f"case{number}")
            work.mkdir()
            for world in (1, 2 * case.pipe):
                port = 29500 + 10 * number + world
                torch.multiprocessing.spawn(process, (world, port, name, str(work)), nprocs=world)
        with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for number, name in enumerate(CASES):
                root = pathlib.Path(temporary, f"case{number}")
                for file in sorted((root / name).rglob("*")):
                    if file.is_file():
                        info = zipfile.ZipInfo(str(file.relative_to(root)))  # without a date
                        info.compress_type = zipfile.ZIP_DEFLATED
                        archive.writestr(info, file.read_bytes())
    print(ARCHIVE, ARCHIVE.stat().st_size)


if __name__ == "__main__":
    main()
