"""Compiled code: what is announced, and copies."""

import logging

import numba
import numpy as np
import pytest

from vla_gym.sim.compiled import announce, copy_matrix, copy_vector


@numba.njit(cache=True)
def _double(x):
    return 2 * x


def test_only_a_compilation_that_will_happen_is_announced(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    caplog.set_level(logging.WARNING)

    def fresh():  # as another process would see it
        return numba.njit(cache=True)(_double.py_func)

    announce(fresh(), "this test")
    assert "Compiling this test" in caplog.text
    caplog.clear()
    compiled = fresh()
    compiled(1.0)
    announce(compiled, "this test")
    announce(fresh(), "this test")  # finds it on the disk
    assert caplog.text == ""


def test_copies_need_equal_shapes():
    vector, matrix = np.zeros(3), np.zeros((4, 2)).T
    copy_vector(np.arange(3.0), vector)
    copy_matrix(np.arange(8.0).reshape(2, 4), matrix)
    assert vector.tolist() == [0, 1, 2] and matrix.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="another length"):
        copy_vector(np.zeros(4), vector)
    for shape in ((2, 5), (1, 4)):
        with pytest.raises(ValueError, match="another shape"):
            copy_matrix(np.zeros(shape), matrix)
