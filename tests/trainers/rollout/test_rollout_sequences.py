"""Windows of rollouts: where they are cut, what they hold, and where gradients end."""

import numpy as np
import pytest
import torch

from vla_gym_trainers.rollout.sequences import unroll, windows_of

#: Of the module's docstring: ``|`` is an end, ``x`` a chunk that is not valid.
ROWS = ("abcd|ef", "g|hxij|k")


def arrays_of(*rows, truncated=()):
    """Names of chunks as numbers, and valid, terminated, truncated; rows without their ``|``."""
    plain = [row.replace("|", "") for row in rows]
    names = torch.tensor([[ord(c) for c in row] for row in plain])
    ended = torch.zeros(names.shape, dtype=torch.bool)
    for r, row in enumerate(rows):
        for end in np.cumsum([len(part) for part in row.split("|")])[:-1]:
            ended[r, end - 1] = True
    by_limit = ended & torch.isin(names, torch.tensor([ord(c) for c in truncated]))
    return names, names != ord("x"), ended & ~by_limit, by_limit


def texts(windows, names):
    taken = windows.take({"name": names})["name"]
    return ["".join(chr(c) if c else "-" for c in row) for row in taken.tolist()]


@pytest.mark.parametrize("truncated", ["", "dg"])
def test_windows_are_those_of_the_docstring(truncated):
    names, *flags = arrays_of(*ROWS, truncated=truncated)
    windows = windows_of(*flags, 3)
    assert texts(windows, names) == ["abc", "d--", "ef-", "g--", "h--", "ij-", "k--"]
    assert windows.mask.tolist() == [[c != "-" for c in row] for row in texts(windows, names)]
    assert texts(windows_of(*flags, 1), names) == list("abcdefghijk")
    assert texts(windows_of(*flags, 6), names) == ["abcd", "ef--", "g---", "h---", "ij--", "k---"]
    some = windows[torch.tensor([3, 0])]
    assert len(some) == 2 and texts(some, names) == ["g--", "abc"]
    assert "".join(chr(c) for c in names[some.chunks()]) == "gabc"


def by_a_loop(valid, ended, length):
    """The same windows, chunk by chunk: lists of (row, slot)."""
    found = []
    for row in range(len(valid)):
        goes_on = False
        for slot in range(len(valid[row])):
            if not valid[row][slot]:
                goes_on = False
                continue
            if not goes_on or len(found[-1]) == length:
                found.append([])
            found[-1].append((row, slot))
            goes_on = not ended[row][slot]
    return found


@pytest.mark.parametrize("length", [1, 2, 5, 12])
def test_each_valid_chunk_lies_in_one_window_of_its_episode(length):
    rng = np.random.default_rng(length)
    valid, terminated, truncated = (
        torch.from_numpy(rng.random((40, 12)) < share) for share in (0.9, 0.15, 0.15)
    )
    windows = windows_of(valid, terminated, truncated, length)
    rows, slots = (part.split(windows.lengths.tolist()) for part in windows.chunks())
    ours = [list(zip(*map(list, both), strict=True)) for both in zip(rows, slots, strict=True)]
    ours = [[(int(row), int(slot)) for row, slot in window] for window in ours]
    assert ours == by_a_loop(valid.tolist(), (terminated | truncated).tolist(), length)


def test_any_array_can_be_taken():
    """As a world model does: frames, numbers and flags by name, 0 behind a window's end."""
    names, *flags = arrays_of(*ROWS)
    frames = names[..., None, None].expand(2, 6, 3, 4).to(torch.uint8)
    numbers = torch.randn(2, 6, 5, requires_grad=True)
    windows = windows_of(*flags, 3)
    taken = windows.take({"frame": frames, "number": numbers, "terminated": flags[1]})
    assert taken["frame"].shape == (7, 3, 3, 4) and taken["frame"].dtype == torch.uint8
    assert taken["number"].shape == (7, 3, 5)
    assert taken["terminated"].tolist()[1] == [True, False, False]
    for name, array in (("frame", frames), ("number", numbers)):
        assert torch.equal(taken[name][windows.mask], array[windows.chunks()])
        assert not taken[name][~windows.mask].any()
    taken["number"].sum().backward()
    assert torch.equal(numbers.grad, flags[0][..., None].expand(2, 6, 5).float())
    nothing = windows_of(flags[0] & False, *flags[1:], 3)
    assert len(nothing) == 0 and nothing.take({"number": numbers})["number"].shape == (0, 1, 5)


def test_unrolling_is_torchs_gru_with_gradients_inside_a_window_alone():
    torch.manual_seed(0)
    whole, cell = torch.nn.GRU(4, 3, batch_first=True), torch.nn.GRUCell(4, 3)
    named = {name.removesuffix("_l0"): p for name, p in whole.state_dict().items()}
    cell.load_state_dict(named)
    inputs = torch.randn(5, 6, 4, requires_grad=True)
    start = torch.randn(5, 3, requires_grad=True)
    before = unroll(lambda seen, memory: cell(seen["x"], memory), {"x": inputs}, start)
    after, _ = whole(inputs, start[None].detach())
    assert torch.equal(before[:, 0], start)
    torch.testing.assert_close(before[:, 1:], after[:, :-1], atol=1e-6, rtol=1e-6)
    # What is before the last chunk depends on all chunks before it, and not on it.
    before[:, -1].square().sum().backward()
    assert (inputs.grad[:, :-1].abs().amax(dim=2) > 0).all() and not inputs.grad[:, -1].any()
    assert start.grad is None  # cut off, not merely small
