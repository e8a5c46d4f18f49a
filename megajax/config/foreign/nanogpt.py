"""Options of nanoGPT: train.py's variables, as its configurator.py takes them (`--batch_size=32`)."""

from megajax.config.foreign.entry import ALWAYS, Entry

NANOGPT: dict[str, Entry] = {
    "--out_dir": ("--run-dir", ""),
    "--eval_interval": ("--validation-every", ""),
    "--log_interval": ("--log-every", ""),
    "--eval_iters": ("--validation-batches", "counted in global batches"),
    "--eval_only": ("", "megajax evaluate scores a trained model"),
    "--always_save_checkpoint": ("--save-every", "a checkpoint is saved whether or not the loss fell"),
    "--init_from": (
        "--init-from DIR",
        "a directory of a Hugging Face model; resume is --resume auto, scratch the default",
    ),
    "--wandb_log": ("--track wandb", ""),
    "--wandb_project": ("--track-project", "with --track wandb"),
    "--wandb_run_name": ("--track-name", "with --track wandb"),
    "--dataset": ("--text FILE", "or --data-path PREFIX, what megajax preprocess writes"),
    "--gradient_accumulation_steps": (
        "--global-batch-size",
        "= batch_size * gradient_accumulation_steps, whose micro-steps are the number of microbatches over all replicas",
    ),
    "--batch_size": (
        "--microbatch-size",
        "nanoGPT's is that of a micro-step; the batch of a step is --global-batch-size",
    ),
    "--block_size": ("--sequence-length", ""),
    "--n_layer": ("--layers", ""),
    "--n_head": ("--heads", ""),
    "--n_embd": ("--hidden", ""),
    "--bias": ("--biases", ""),
    "--max_iters": ("--steps", ""),
    "--grad_clip": ("--clip-norm", "none: no clipping"),
    "--decay_lr": ("--learning-rate-decay", "constant: no decay"),
    "--warmup_iters": ("--warmup-steps", ""),
    "--lr_decay_iters": ("--decay-samples", "= lr_decay_iters * global batch size; by default the whole run"),
    "--min_lr": ("--minimum-learning-rate", ""),
    "--backend": ("", "not needed: XLA uses NCCL on GPUs, and Gloo on CPUs"),
    "--device": ("--devices", "gpu, cpu or cpu:COUNT"),
    "--dtype": ("--precision", "bf16, fp16 or fp32"),
    "--compile": ("", ALWAYS),
}
