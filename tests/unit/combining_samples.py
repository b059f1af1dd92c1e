"""Models to combine, and what must come of them, computed in float64."""

import math

import ml_dtypes
import numpy as np

BF16 = ml_dtypes.bfloat16

DIGITS = {
    "BF16": (8, -133),
    "F16": (11, -24),
    "F32": (24, -149),
    "F64": (53, -1074),
    "F8_E4M3": (4, -9),
    "F8_E5M2": (3, -16),
    "F4": (2, -1),
}
"""Bits of the significand, and the exponent of the smallest number above zero."""


def ulps_off(found, expected, dtype):
    """By how many units in the last place results are off, at the most."""
    digits, smallest = DIGITS[dtype]
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    _, exponents = np.frexp(expected)
    ulp = np.ldexp(1.0, np.maximum(exponents - digits, smallest))
    return float((np.abs(found - expected) / ulp).max(initial=0))


def weighted(models, weights, name):
    """The mean of a tensor in float64."""
    total = math.fsum(weights)
    parts = [np.asarray(model[name]).astype(np.float64) for model in models]
    return sum(weight / total * part for weight, part in zip(weights, parts, strict=True))


def mixed_models(count, seed=0):
    """Models of every kind of tensor with a mean, and of integers that agree."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    return [
        {
            "bf16": normal(257, 331).astype(BF16),
            "bf16.odd": normal(7).astype(BF16),
            "f16": (normal(63, 65) * 100).astype(np.float16),
            "f32": normal(1000, 3).astype(np.float32),
            "f64": normal(77),
            "f8": normal(40).astype(ml_dtypes.float8_e4m3fn),
            "f8.wide": normal(41).astype(ml_dtypes.float8_e5m2),
            "c64": (normal(9) + 1j * normal(9)).astype(np.complex64),
            "f4": normal(6, 4).astype(ml_dtypes.float4_e2m1fn),
            "scalar": np.float32(normal()),
            "empty": np.zeros((0, 5), np.float32),
            "steps": np.arange(12).reshape(3, 4),
            "mask": np.array([True, False, True]),
        }
        for _ in range(count)
    ]
