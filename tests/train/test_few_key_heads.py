"""Fewer key and value heads than ranks of a tensor group: losses, gradients and texts are those of one device."""

import dataclasses

import numpy as np
import pytest

from megajax.config import ParallelConfig
from megajax.config.sample import SampleConfig
from megajax.generate.decoder import Decoder, DecodeSizes, decoding_run
from megajax.interop.weight_source import HuggingFaceSource
from megajax.runtime.mesh import make_mesh
from tests import small
from tests.generate.test_decoder import tokens_of
from tests.interop.hugging_face import golden
from tests.interop.make_golden import NEW, PROMPT, tokens

pytestmark = pytest.mark.slow
MODELS = {
    "two": small.LLAMA,
    "one, biases, norms of heads": dataclasses.replace(small.QWEN, kv_heads=1),
    "norms over all heads, sinks": dataclasses.replace(
        small.LLAMA, query_key_norm=True, query_key_norm_over="projection", attention_sinks=True
    ),
}
LAYOUTS = [
    ((1, 2, 4), {"schedule": "zb_v", "chunks": 2}),
    ((2, 1, 4), {"schedule": "1f1b", "zero": 3}),
    ((1, 2, 4), {"schedule": "interleaved_1f1b", "chunks": 2, "recompute": "full", "sequence_parallel": False}),
    ((1, 2, 4), {"schedule": "1f1b", "attention": "tokamax"}),
    ((1, 1, 4), {"context": 2}),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout[1].get("schedule", "context"))
@pytest.mark.parametrize("model", MODELS)
def test_losses_and_gradients(model, layout):
    mesh, options = layout
    training = small.training_of(small.make_run(mesh, model=MODELS[model], **options))
    params = small.place(training, small.busy_params(MODELS[model]))
    loss, gradients = training.loss_and_gradients(params, small.make_batch(training.run))
    want_loss, want = small.expected(MODELS[model])
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    small.assert_gradients_close(small.canonical(gradients, training), want, rtol=1e-5)


def test_greedy_text():
    source = HuggingFaceSource(str(golden("llama")))  # two heads of keys and values
    run = decoding_run(source.run("fp32"), ParallelConfig(pipe=2, tensor=4))
    decoder = Decoder(
        run,
        make_mesh(run.parallel),
        DecodeSizes(samples=2, prompt=PROMPT, new=NEW, chunk=5),
        SampleConfig(temperature=0),
    )
    found = tokens_of(decoder, source.load(decoder), list(tokens()[:, :PROMPT].astype(np.int32)))
    np.testing.assert_array_equal(found, np.load(golden("llama") / "greedy.npy"))
