"""Comparison of nested results: the same values, keys, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def assert_same(
    actual: Any,
    expected: Any,
    where: str = "",
    loose: Mapping[str, float] = {},
    atol: float = 0.0,
) -> None:
    """Compare nested mappings, sequences, object arrays, arrays and tensors exactly.

    Args:
        actual: What was found.
        expected: What it must be.
        where: Named in a failure.
        loose: By a mapping's key, how far numbers below it may be off.
        atol: The same for numbers here.
    """
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{where}: {type(actual)}"
        assert set(actual) == set(expected), f"{where}: {set(actual) ^ set(expected)}"
        for key in expected:
            tolerance = loose.get(key, atol)
            assert_same(actual[key], expected[key], f"{where}/{key}", loose, tolerance)
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), where
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]", loose, atol)
    elif isinstance(expected, np.ndarray | np.generic | torch.Tensor):
        assert type(actual) is type(expected), f"{where}: {type(actual)} != {type(expected)}"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} != {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape} != {expected.shape}"
        if expected.dtype == object:
            assert_same(list(actual.flat), list(expected.flat), where, loose, atol)
        elif atol:
            np.testing.assert_allclose(actual, expected, rtol=0, atol=atol, err_msg=where)
        else:
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected), err_msg=where)
    else:
        assert actual == expected, f"{where}: {actual!r} != {expected!r}"
