"""Options of DeepSpeed: its launcher's, and the keys of its configuration file, with a dot between their levels."""

from megajax.config.foreign.entry import ALWAYS, GLOBAL, Entry

NODES = "with --coordinator and --process-id; megajax launch --nodes MIN:MAX supervises a host"

DEEPSPEED: dict[str, Entry] = {
    "--deepspeed_config": ("--config FILE", "a config.toml that megajax wrote; this table has the keys of DeepSpeed's"),
    "--num_nodes": ("--processes", NODES),
    "--num_gpus": ("--devices gpu", "all visible GPUs are used: CUDA_VISIBLE_DEVICES chooses them"),
    "--hostfile": ("--processes", NODES),
    "--node_rank": ("--process-id", ""),
    "--master_addr": ("--coordinator HOST:PORT", ""),
    "--master_port": ("--coordinator HOST:PORT", ""),
    "--elastic_training": ("", "megajax launch --nodes MIN:MAX continues on other numbers of hosts"),
    "--autotuning": ("", "megajax plan searches for the fastest layout"),
    "--train_batch_size": ("--global-batch-size", GLOBAL),
    "--train_micro_batch_size_per_gpu": ("--microbatch-size", "of a replica"),
    "--gradient_accumulation_steps": (
        "--global-batch-size",
        "= micro-batch * replicas * accumulation steps; accumulation follows from it and --microbatch-size",
    ),
    "--gradient_clipping": ("--clip-norm", "none: no clipping"),
    "--steps_per_print": ("--log-every", ""),
    "--wall_clock_breakdown": ("--profile START:STOP", ""),
    "--zero_optimization.stage": ("--zero", "0, 1 or 3; for 2 pass 1"),
    "--zero_optimization.overlap_comm": ("", "not needed: XLA schedules the collectives"),
    "--zero_optimization.offload_optimizer": ("", "not supported: --zero 1 shards the optimizer's state"),
    "--zero_optimization.offload_param": ("", "not supported: --zero 3 shards the weights"),
    "--bf16.enabled": ("--precision bf16", ""),
    "--fp16.enabled": ("--precision fp16", ""),
    "--fp16.loss_scale": ("--initial-loss-scale", "the scale is dynamic"),
    "--fp16.initial_scale_power": ("--initial-loss-scale", "= 2 to this power"),
    "--fp16.loss_scale_window": ("--loss-scale-window", ""),
    "--fp16.hysteresis": ("", "not needed: 2 overflows, its default"),
    "--optimizer.type": ("--optimizer", "adamw, lion, adafactor or muon; others: Trainer(optimizer=...)"),
    "--optimizer.params.lr": ("--learning-rate", ""),
    "--optimizer.params.betas": ("--beta1", "and --beta2"),
    "--optimizer.params.eps": ("--epsilon", ""),
    "--optimizer.params.weight_decay": ("--weight-decay", ""),
    "--scheduler.type": ("--learning-rate-decay", "cosine, linear, constant or wsd"),
    "--scheduler.params.warmup_max_lr": ("--learning-rate", ""),
    "--scheduler.params.warmup_num_steps": ("--warmup-steps", ""),
    "--scheduler.params.total_num_steps": ("--decay-samples", "= steps * global batch size; by default the whole run"),
    "--activation_checkpointing.partition_activations": (
        "",
        "not needed: --sequence-parallel splits activations over --tensor",
    ),
    "--activation_checkpointing.cpu_checkpointing": ("--offload-activations", ""),
    "--pipeline.stages": ("--pipe", ""),
    "--tensorboard.enabled": ("--tensorboard", ""),
    "--wandb.enabled": ("--track wandb", ""),
    "--flops_profiler.enabled": ("", ALWAYS),
}
