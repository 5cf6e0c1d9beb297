"""Comparison of nested results: the same values, types and keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def assert_equal_trees(actual: Any, expected: Any, where: str = "") -> None:
    """Compare nested dicts, sequences, object arrays of dicts, arrays and tensors, dtypes too."""
    assert type(actual) is type(expected), where
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), where
        for key in expected:
            assert_equal_trees(actual[key], expected[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple) or (
        isinstance(expected, np.ndarray) and expected.dtype == object
    ):
        assert len(actual) == len(expected), where
        for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_equal_trees(one, other, f"{where}[{i}]")
    elif isinstance(expected, np.ndarray | np.generic | torch.Tensor):
        assert actual.dtype == expected.dtype, where
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected), err_msg=where)
    else:
        assert actual == expected, where
