"""The options that commands share which run a trained model: its weights, its precision, and the mesh.

No jax is imported here: the devices are chosen before it starts.
"""

from collections.abc import Mapping
from typing import Any

from megajax.config import ConfigError
from megajax.config.options import add_trust
from megajax.schedules.arguments import CommandParser, plain_text, whole
from megajax.schedules.paths import local_path, store_path

__all__ = ["add_mesh_options", "add_model_options", "check_model_options", "usual_precision"]


def add_model_options(parser: CommandParser) -> None:
    """Adds --run-dir, --init-from, --trust, --step, --ema and --precision."""
    parser.renamed["--hf"] = "--init-from"
    model = parser.add_argument_group("the model")
    model.add_argument("--run-dir", type=store_path, metavar="RUN", help="directory of a training run with checkpoints")
    model.add_argument(
        "--init-from",
        type=local_path,
        metavar="DIR",
        help="directory of a Hugging Face model, or its name ORG/NAME on the Hub",
    )
    add_trust(model)
    model.add_argument("--step", type=whole(0), metavar="STEP", help="the run's checkpoint (default: the newest)")
    model.add_argument(
        "--ema",
        action="store_true",
        default=False,
        help="the checkpoint's averaged weights, of a run with --ema-decay (default: off)",
    )
    model.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), help="of the computation (default: bf16 on GPUs, fp32 on CPUs)"
    )


def check_model_options(given: Mapping[str, Any]) -> None:
    """Checks that the options name one model.

    Raises:
      ConfigError: they name none, or two; or a step of a directory of Hugging Face.
    """
    if (given["run_dir"] is None) == (given["init_from"] is None):
        problem = "there is no model" if given["init_from"] is None else "--run-dir and --init-from are both given"
        raise ConfigError(f"{problem}: pass one of --run-dir RUN and --init-from DIR.")
    if given["init_from"] and given["ema"]:
        raise ConfigError(
            "--ema is of a checkpoint of --run-dir; a directory of Hugging Face has no average: omit --ema."
        )
    if given["init_from"] and given["step"] is not None:
        raise ConfigError(
            "--step chooses a checkpoint of --run-dir, and a directory of Hugging Face has one: omit --step."
        )


def usual_precision(platform: str) -> str:
    """The default of --precision on devices of a platform, "cpu" or "gpu"."""
    return "fp32" if platform == "cpu" else "bf16"


def add_mesh_options(group: Any, meaning_of_data: str) -> None:
    """Adds --data, --pipe, --tensor and --devices to a parser's group; `meaning_of_data` is the help of --data."""
    for name, meaning in (
        ("data", meaning_of_data),
        ("pipe", "pipeline ranks that the layers are split over"),
        ("tensor", "devices that each layer is split over"),
    ):
        group.add_argument(f"--{name}", type=whole(), default=1, help=f"{meaning} (default: 1)")
    group.add_argument(
        "--devices", type=plain_text, metavar="WHERE", help="gpu, cpu or cpu:COUNT (default: GPUs, if any)"
    )
