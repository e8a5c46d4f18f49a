"""Rotary frequencies compared with those of transformers 5.23 (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`), heads of 16."""

import dataclasses

import numpy as np
import pytest

from megajax.models.rotary import attention_factor, frequencies
from tests.models.configs import LLAMA

FACTORS = ("1.04", "1.08", "1.12", "1.16", "1.2", "1.24", "1.28", "1.32")  # of samples of up to 4,096 tokens
FACTORS += ("1.5", "3.75", "6.0", "8.25", "10.5", "12.75", "15.0", "17.25")
CASES = {
    "llama3": (
        dict(rotary_scaling="llama3", rotary_base=5e5, rotary_factor=8.0, rotary_original_length=8192),
        [1.0, 0.193922758, 0.0376060307, 0.00729266508, 0.000524846022, 3.42810235e-05, 6.64786967e-06, 1.28917316e-06],
        1.0,
    ),
    "yarn": (
        dict(rotary_scaling="yarn", rotary_base=1e6, rotary_factor=4.0, rotary_original_length=32768),
        [1.0, 0.177827939, 0.0316227786, 0.00421755994, 0.000500000024, 4.44569851e-05, 7.90569356e-06, 1.40585337e-06],
        1.138629436111989,
    ),
    "yarn with its own bounds": (
        dict(
            rotary_scaling="yarn",
            rotary_factor=16.0,
            rotary_original_length=2048,
            rotary_beta_fast=16.0,
            rotary_beta_slow=2.0,
            rotary_attention_factor=1.5,
        ),
        [1.0, 0.316227764, 0.100000001, 0.0217406601, 0.00374999968, 0.000197642366, 6.2500003e-05, 1.97642366e-05],
        1.5,
    ),
    "longrope": (
        dict(rotary_scaling="longrope", rotary_factor=32.0, rotary_original_length=4096, rotary_factors=FACTORS),
        [
            0.961538494,
            0.292803466,
            0.0892857164,
            0.027261015,
            0.00833333284,
            0.00255022408,
            0.000781250012,
            0.000239566492,
        ],
        1.1902380714238083,
    ),
    "longrope of longer samples": (
        dict(
            rotary_scaling="longrope",
            rotary_factor=32.0,
            rotary_original_length=4096,
            rotary_factors=FACTORS,
            rotary_attention_factor=1.5,
            sequence_length=4098,
        ),
        [
            0.666666687,
            0.0843273997,
            0.0166666675,
            0.00383306388,
            0.000952380942,
            0.000248021795,
            6.66666674e-05,
            1.83320444e-05,
        ],
        1.5,
    ),
    "linear": (
        dict(rotary_scaling="linear", rotary_factor=4.0),
        [0.25, 0.079056941, 0.0250000004, 0.00790569466, 0.00249999994, 0.000790569466, 0.000250000012, 7.90569466e-05],
        1.0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_scaled_frequencies_are_those_of_transformers(case):
    fields, want, factor = CASES[case]
    config = dataclasses.replace(LLAMA, head_size=16, **fields)
    config.validate()
    np.testing.assert_allclose(frequencies(config), want, rtol=1e-6)
    np.testing.assert_allclose(frequencies(config, np), want, rtol=1e-6)
    assert attention_factor(config) == pytest.approx(factor, rel=1e-12)


def test_the_original_context_is_the_samples_unless_it_is_given():
    scaled = dataclasses.replace(LLAMA, head_size=16, rotary_scaling="llama3", rotary_factor=8.0, sequence_length=8192)
    given = dataclasses.replace(scaled, rotary_original_length=8192)
    np.testing.assert_array_equal(frequencies(scaled, np), frequencies(given, np))
