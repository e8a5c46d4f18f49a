"""An entry of the tables of other tools' options."""

# (the options here that do the same, a remark). Options may have values, "--precision bf16". "" says that there is none, and
# the remark why.
Entry = tuple[str, str]

ALWAYS, NOT_SUPPORTED = "not needed: always on", "not supported"
GLOBAL = "the whole batch of a step, over all replicas and microbatches"
NODES = "with --coordinator and --process-id; megajax launch --nodes MIN:MAX supervises a host"
EPOCHS = "finetune and finetune-bert have --epochs; else steps = epochs * samples / global batch size"
TOKENIZERS = "byte, gpt2, or a file, whose kind is seen from it"
