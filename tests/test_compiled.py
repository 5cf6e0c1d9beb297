"""Waiting for compilations is announced."""

import logging

import numba

from vla_gym.sim.compiled import announce


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
