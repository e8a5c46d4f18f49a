"""The data: text, datasets or answers to learn, the tokenizer, and the treatment of document boundaries."""

from dataclasses import dataclass

from megajax.config.errors import ConfigError
from megajax.config.fields import check_fields, setting
from megajax.config.tasks import TASKS
from megajax.config.validation_sets import validation_sets
from megajax.schedules.arguments import FLOAT32

DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's
BLEND = "PREFIX, or a blend WEIGHT PREFIX WEIGHT PREFIX ... (without weights: in proportion to size)"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The data of a run. Names and meanings are Megatron-LM's, but for those of supervised fine-tuning (sft)."""

    text: str | None = setting(
        None, "text file to train on", metavar="FILE", text_kind="path", shown_default="the bundled corpus"
    )
    data_path: tuple[str, ...] | None = setting(
        None,
        f"indexed datasets to train and validate on, as megajax.data.preprocess or Megatron-LM writes them: {BLEND}",
        metavar="PREFIX",
        text_kind="store",
        list_style="words",
    )
    train_data_path: tuple[str, ...] | None = setting(
        None,
        "indexed datasets to train on only, as --data-path",
        metavar="PREFIX",
        text_kind="store",
        list_style="words",
    )
    valid_data_path: tuple[str, ...] | None = setting(
        None,
        "indexed datasets to validate on only, as --data-path; several sets: NAME=PREFIX ... NAME=PREFIX ...",
        metavar="PREFIX",
        text_kind="store",
        list_style="words",
    )
    stream: tuple[str, ...] | None = setting(
        None,
        "texts to tokenize during the training: files, patterns, URLs or hub:ORG/NAME, as preprocess reads them; or a "
        "blend WEIGHT SOURCE ... WEIGHT SOURCE ...",
        metavar="SOURCE",
        text_kind="source",
        list_style="words",
    )
    stream_weights: tuple[str, ...] | None = setting(
        None,
        "other weights of --stream from a number of samples on: SAMPLES:WEIGHT,WEIGHT,... for each",
        metavar="SAMPLES:WEIGHTS",
        list_style="words",
    )
    text_key: str = setting("text", "key or column of --stream's texts", metavar="KEY")
    stream_split: str | None = setting(None, "split of --stream's datasets", metavar="NAME", shown_default="train")
    stream_subset: str | None = setting(
        None, "subset of --stream's datasets on the Hub", metavar="NAME", shown_default="the only one"
    )
    stream_workers: int = setting(2, "processes that tokenize --stream; 0: none, a thread does", low=0, below=1025)
    shuffle_samples: int = setting(1024, "--stream: samples that are shuffled at a time; 0: none are", low=0)
    sft_data: tuple[str, ...] | None = setting(
        None,
        "JSON lines, Parquet or hub:ORG/NAME to fine-tune on, with loss on the answers only: chats (messages), or prompts "
        "and completions",
        metavar="SOURCE",
        text_kind="source",
        list_style="words",
    )
    valid_sft_data: tuple[str, ...] | None = setting(
        None,
        "JSON lines to validate on, as --sft-data; several sets: NAME=FILE ... NAME=FILE ...",
        metavar="FILE",
        text_kind="path",
        list_style="words",
    )
    chat_template: str | None = setting(
        None,
        "Jinja template of chats",
        metavar="FILE",
        text_kind="path",
        shown_default="the one beside the tokenizer's file",
    )
    long_samples: str = setting(
        "cut", "samples of --sft-data that are longer than the sequence: cut their ends, or drop them", ("cut", "drop")
    )
    task: str | None = setting(
        None, "task that a BERT is fine-tuned on", tuple(TASKS), metavar="NAME", shown_default="none"
    )
    task_data: tuple[str, ...] | None = setting(
        None,
        "samples of --task to train on: JSON lines, GLUE's .tsv, SQuAD's .json, or RACE's folders",
        metavar="FILE",
        text_kind="path",
        list_style="words",
    )
    dev_data: tuple[str, ...] | None = setting(
        None, "samples of --task that are scored after each epoch", metavar="FILE", text_kind="path", list_style="words"
    )
    doc_stride: int = setting(128, "SQuAD: tokens between the beginnings of two windows of a context")
    max_query_length: int = setting(
        64, "most tokens of SQuAD's questions, or RACE's with an answer; the rest is cut off"
    )
    max_answer_length: int = setting(30, "SQuAD: most tokens of a predicted answer")
    null_threshold: float = setting(
        0.0,
        "SQuAD 2.0: a question has no answer if its score without one exceeds that of its best answer by more than this",
        low=-FLOAT32,
    )
    split: str | None = setting(
        None, "shares of --data-path for training, validation, test", metavar="A,B,C", shown_default=DEFAULT_SPLIT
    )
    data_cache: str | None = setting(
        None,
        "directory of the sample indices, and of the copies of pairs that are read from gs:// and s3://",
        metavar="DIR",
        text_kind="path",
        shown_default="in the dataset's folder, and ~/.cache/megajax/data",
    )
    verify_data: bool = setting(
        False, "read all of --data-path's files before the training and compare them with their checksums"
    )
    tokenizer: str = setting(
        "byte",
        "byte, gpt2, wordpiece, or a file: tokenizer.json, SentencePiece's .model, or vocab.txt",
        metavar="NAME|FILE",
        text_kind="path",
    )
    end_of_document: str | None = setting(
        None, "token that ends documents", metavar="TOKEN", shown_default="the tokenizer's usual one"
    )
    reset_position_ids: bool = setting(False, "position ids restart at 0 in every document of a sample")
    reset_attention_mask: bool = setting(False, "tokens attend only to their own document")
    eod_mask_loss: bool = setting(False, "no loss on the prediction after an end-of-document token")

    @property
    def resets_positions(self) -> bool:
        """Whether batches have "positions": packed samples of fine-tuning always do."""
        return self.reset_position_ids or self.sft_data is not None

    @property
    def resets_attention(self) -> bool:
        """Whether batches have "document", likewise."""
        return self.reset_attention_mask or self.sft_data is not None

    def validate(self) -> None:
        """Checks the options; no file is opened.

        Raises:
            ConfigError: for the first field that is illegal, alone or with the others.
        """
        check_fields(self)
        apart = {"--train-data-path": self.train_data_path, "--valid-data-path": self.valid_data_path}
        sources = {"--text": self.text, "--data-path": self.data_path, "--sft-data": self.sft_data} | apart
        sources |= {"--task-data": self.task_data, "--stream": self.stream}
        given = [name for name, value in sources.items() if value]
        if len(given) > 1 and not (set(given) <= set(apart) or set(given) == {"--stream", "--valid-data-path"}):
            raise ConfigError(f"{' and '.join(given)} exclude one another: pass one of them.")
        if given == ["--valid-data-path"]:
            raise ConfigError("--valid-data-path needs training data too: pass --train-data-path PREFIX.")
        for name, value in {"--task": self.task, "--dev-data": self.dev_data}.items():
            if value and not self.task_data:
                raise ConfigError(f"{name} has no samples to train on: pass --task-data FILE.")
        for name, value in {"--stream-weights": self.stream_weights, "--stream-split": self.stream_split}.items():
            if value and not self.stream:
                raise ConfigError(f"{name} belongs to a stream, and there is none: pass --stream SOURCE.")
        if self.task_data and not self.task:
            raise ConfigError(f"--task-data is of a task: pass --task {', '.join(TASKS)}.")
        for name, value in {"--valid-sft-data": self.valid_sft_data, "--chat-template": self.chat_template}.items():
            if value and not self.sft_data:
                raise ConfigError(
                    f"{name} belongs to fine-tuning, and there is nothing to train on: pass --sft-data FILE."
                )
        for name, words in {"--valid-data-path": self.valid_data_path, "--valid-sft-data": self.valid_sft_data}.items():
            validation_sets(words or (), name)
        if self.split is not None and not self.data_path:
            raise ConfigError(
                "--split divides --data-path, which is not given: pass --data-path PREFIX, or omit --split."
            )
