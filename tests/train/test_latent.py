"""Latent attention: losses and gradients are those of one device, in every recompute mode, with fused kernels and rings.

tests/interop/test_described.py compares it with transformers.
"""

import dataclasses

import numpy as np
import pytest

from tests import small

pytestmark = pytest.mark.slow
LATENT = dataclasses.replace(
    small.LLAMA,
    kv_heads=None,
    head_size=6,
    kv_latent=10,
    query_latent=7,
    rotary_head_size=2,
    value_head_size=5,
    attention_scale=0.5,
)
MODELS = {
    "latents": LATENT,
    "queries without a latent, wide values": dataclasses.replace(
        LATENT, query_latent=0, value_head_size=9, rotary_pairs="neighbours"
    ),
    "a window in every second layer, a soft cap": dataclasses.replace(
        LATENT, attention_softcap=3.0, layer_pattern="local,global", kind_fields=("local.sliding_window=5",)
    ),
}
LAYOUTS = [
    ((1, 2, 4), {"schedule": "zb_v", "chunks": 2}),
    ((1, 2, 4), {"schedule": "zb_v", "chunks": 2, "recompute": "none"}),
    ((2, 1, 4), {"schedule": "1f1b", "zero": 3}),
    ((1, 2, 4), {"schedule": "interleaved_1f1b", "chunks": 2, "recompute": "full", "sequence_parallel": False}),
    ((1, 2, 2), {"schedule": "eager_1f1b", "tensor_overlap": "ring"}),
    ((1, 2, 2), {"schedule": "interleaved_1f1b", "chunks": 2, "context": 2}),
    ((1, 2, 2), {"schedule": "1f1b", "attention": "tokamax"}),
]
NAMES = ("zb_v", "none", "ZeRO-3", "full", "ring", "context", "fused")
CASES = [
    (model, layout)
    for model in MODELS
    for layout in NAMES
    if layout not in ("context", "fused") or not MODELS[model].attention_softcap
]


@pytest.mark.parametrize(("model", "layout"), CASES)
def test_losses_and_gradients(model, layout):
    mesh, options = LAYOUTS[NAMES.index(layout)]
    training = small.training_of(small.make_run(mesh, model=MODELS[model], **options))
    params = small.place(training, small.busy_params(MODELS[model]))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    want_loss, want = small.expected(MODELS[model])
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)
