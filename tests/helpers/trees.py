"""Comparison of nested results: the same values, keys, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """Compare nested mappings, sequences, object arrays, arrays and tensors exactly."""
    if isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{where}: {type(actual)}"
        assert set(actual) == set(expected), f"{where}: {set(actual) ^ set(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected), where
        for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
            assert_same(a, b, f"{where}[{i}]")
    elif isinstance(expected, np.ndarray | np.generic | torch.Tensor):
        assert type(actual) is type(expected), f"{where}: {type(actual)} != {type(expected)}"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} != {expected.dtype}"
        assert actual.shape == expected.shape, f"{where}: {actual.shape} != {expected.shape}"
        if expected.dtype == object:
            assert_same(list(actual.flat), list(expected.flat), where)
        else:
            np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected), err_msg=where)
    else:
        assert actual == expected, f"{where}: {actual!r} != {expected!r}"
