"""A recurrent policy: what is carried while it plays, and what its windows learn."""

import numpy as np
import pytest
import torch
from on_policy_toys import part_of, random_targets, rollouts_of
from test_on_policy_distributed import assert_as_one, two_processes
from test_on_policy_rl_token import networks_of
from toy_memory_env import ProprioVLA
from toy_token_env import LIMIT

from vla_gym.errors import WorkerRestartWarning
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.distributed import ProcessGroup
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.minibatches import gather, micro_batches, refer
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.recurrence import recompute

SIZE = 6  # of the memory


def recurrent(seed=0, chunk_len=2, **changes):
    """A policy whose chunks and values depend on its memory."""
    changes = {"sigma": 0.3, "memory_size": SIZE, **changes}
    policy = networks_of(ProprioVLA(), chunk_len=chunk_len, seed=seed, **changes).policy
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        policy.actor.actor.head.weight.normal_(0.0, 0.5, generator=generator)
        policy.value_head.head.fc2.weight.normal_(0.0, 0.5, generator=generator)
    return policy


def play(policy, *, chunks=24, episodes=None, times=1, groups=1, seed=3, num_envs=4, **toy):
    """Rollouts one after the other; episodes have up to 10 chunks of 2 control steps."""
    sizes = {"num_envs": num_envs, "num_chunks": chunks, "episodes": episodes}
    toy = {"chunk_len": 2, "goal": 0.5, **toy}
    return rollouts_of(policy, sizes, times=times, groups=groups, seed=seed, **toy)


@pytest.fixture(scope="module")
def rollouts():
    """Two, one after the other; not to be changed."""
    return play(recurrent(), times=2)


@torch.no_grad()
def replayed(policy, rollout, row, memory=None, action=None):
    """Memory before and after each chunk of a row, and its value, one chunk after the other."""
    data, before, after, values = rollout.data[row], [], [], []
    memory = torch.zeros(1, SIZE) if memory is None else memory
    action = torch.zeros(1, *policy.carried["previous_action"]) if action is None else action
    for t in range(rollout.num_chunks):
        seen = {name: data[name][t : t + 1] for name in rollout.observation}
        torch.testing.assert_close(seen["previous_action"], action, atol=1e-6, rtol=0)
        seen |= {"memory": memory, "previous_action": action}
        before.append(memory)
        values.append(policy.values(seen, [""])[0])
        memory = policy.remember(seen)
        after.append((memory, action := policy.actions(data["sample"][t : t + 1], seen)))
        if data["terminated"][t] or data["truncated"][t]:
            memory, action = torch.zeros(1, SIZE), torch.zeros_like(action)
    return torch.cat(before), after, torch.stack(values)


def test_a_rollout_holds_the_memory_before_each_chunk():
    policy = recurrent()
    first, second = play(policy, times=2, groups=2)
    assert first.data["valid"].all() and first.ended.sum() >= 8 and first.ended.any(dim=1).all()
    for row in range(4):
        before, after, values = replayed(policy, first, row)
        data = first.data[row]
        torch.testing.assert_close(data["memory"], before, atol=1e-6, rtol=0)
        torch.testing.assert_close(data["values"], values, atol=1e-5, rtol=0)
        begins = torch.cat([torch.tensor([True]), first.ended[row, :-1]])
        assert not data["memory"][begins].any() and not data["previous_action"][begins].any()
        assert (data["memory"][~begins].abs().amax(dim=1) > 1e-3).all()
        # The next rollout goes on with what was carried, if the episode does.
        carried = (None, None) if first.ended[row, -1] else after[-1]
        before, _, values = replayed(policy, second, row, *carried)
        torch.testing.assert_close(second.data[row]["memory"], before, atol=1e-6, rtol=0)
        # At the seam the bootstrap was read off the memory after the chunk.
        if not first.ended[row, -1]:
            assert data["next_values"][-1].item() == pytest.approx(values[0].item(), abs=1e-5)
    assert not first.ended[:, -1].all()
    inner = ~first.ended[:, :-1]
    values, following = first.data["next_values"][:, :-1], first.data["values"][:, 1:]
    assert torch.equal(values[inner], following[inner])


def test_an_episode_cut_off_is_valued_with_the_memory_after_its_last_chunk():
    """20 control steps in chunks of 8: of the last one 4 are executed."""
    policy = recurrent(chunk_len=8)
    seen, values = [], policy.values
    policy.values = lambda rows, texts: seen.append(rows) or values(rows, texts)
    (rollout,) = play(policy, chunks=3, episodes=2, chunk_len=8, goal=9.0)
    assert rollout.data["truncated"][:, 2].all() and LIMIT % 8 == 4
    bootstraps = {key: np.concatenate([rows[key] for rows in seen]) for key in seen[0]}
    assert len(bootstraps["memory"]) == len(rollout.data)
    for row in range(len(rollout.data)):
        _, after, _ = replayed(policy, rollout, row)
        memory, action = after[-1]
        where = np.abs(bootstraps["memory"] - memory.numpy()).max(axis=1).argmin()
        np.testing.assert_allclose(bootstraps["memory"][where], memory[0], atol=1e-6)
        action[0, 4:] = 0.0
        np.testing.assert_allclose(bootstraps["previous_action"][where], action[0], atol=1e-6)
        one = {key: value[where : where + 1] for key, value in bootstraps.items()}
        expected = values(one, [""]).item()
        assert rollout.data["next_values"][row, 2].item() == pytest.approx(expected, abs=1e-5)
        assert abs(expected - values({**one, "memory": one["memory"] * 0}, [""]).item()) > 1e-4


def test_a_workers_death_begins_an_episode_without_memory(tmp_path):
    policy = recurrent()
    with pytest.warns(WorkerRestartWarning):
        (rollout,) = play(policy, num_envs=2, workers=1, die_in=(0, str(tmp_path / "died")))
    lost = ~rollout.data["valid"]
    assert lost.any(dim=1).all() and not lost[:, -1].any()
    for row in range(2):
        slot = int(lost[row].nonzero()[-1]) + 1
        assert rollout.data["memory"][row, slot - 1].any()
        assert not rollout.data["memory"][row, slot].any()
        assert not rollout.data["previous_action"][row, slot].any()


def learner_of(policy, group=None, **settings):
    settings = {"ratio_level": "chunk", "learning_rate": 1e-2, "seed": 3, **settings}
    settings = {"bptt_length": 4, "num_minibatches": 1, "value_clip": None, **settings}
    return Learner(policy, PPOConfig(**settings), group=group)


@pytest.mark.parametrize(
    ("memory_start", "sequential"), [("stored", True), ("recomputed", True), ("stored", False)]
)
def test_the_first_ratios_are_one(rollouts, memory_start, sequential):
    """To float32: acting sees 4 rows at once and learning more, so products may round apart."""
    _, rollout = rollouts
    assert rollout.data["memory"][:, 0].any()  # an episode of the rollout before goes on
    settings = {"memory_start": memory_start, "sequential_training": sequential}
    phase = Phase(value=False)

    def deviation(rollout):
        learner = learner_of(recurrent(), **settings)
        return learner.update(rollout, *random_targets(rollout), phase)["train/ratio_deviation"]

    assert deviation(rollout) < 2e-6
    forgotten = part_of(rollout)
    forgotten.data["memory"].zero_()
    assert deviation(forgotten) > 1e-3


def by_hand(policy, rollout, targets, length, start):
    """Gradients of surrogate and value loss: an unrolled loop over each window, in plain torch."""
    data, (advantages, valid, returns) = rollout.data, targets
    total = torch.zeros(())
    for row in range(len(data)):
        since = 0
        for t in range(rollout.num_chunks):
            if t and rollout.ended[row, t - 1]:
                since = 0
            if since % length == 0:
                memory = start[row, t : t + 1]
            seen = {name: data[name][row, t : t + 1] for name in rollout.observation}
            actor = policy.actor
            x = actor.normalizer(seen)
            inputs = torch.cat([x, seen["previous_action"].flatten(1)], dim=1)
            memory = actor.gru(inputs, memory)
            mean = actor.actor.coefficients(
                torch.cat([x, memory], dim=1), seen["vla_action"].flatten(1)
            )
            normal = torch.distributions.Normal(mean, actor.log_std.exp())
            log_prob = normal.log_prob(data["sample"][row, t : t + 1]).sum()
            ratio = (log_prob - data["log_probs"][row, t].sum()).exp()
            value = policy.value_head.head(torch.cat([x, memory], dim=1))[0]
            total = total - ratio * advantages[row, t]
            total = total + 0.5 * 0.5 * (value - returns[row, t]) ** 2
            since += 1
    policy_parameters = list(policy.named_parameters().items())
    loss = total / valid.sum()
    gradients = torch.autograd.grad(loss, [p for _, p in policy_parameters])
    return dict(zip([name for name, _ in policy_parameters], gradients, strict=True))


@pytest.mark.parametrize("memory_start", ["stored", "recomputed"])
def test_the_gradient_is_that_of_an_unrolled_loop_cut_off_at_windows(rollouts, memory_start):
    policy, (_, rollout) = recurrent(), rollouts
    with torch.no_grad():  # a little away from who acted: what is stored is stale
        for p in policy.named_parameters().values():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
    targets, found = random_targets(rollout), {}
    start, recomputed = rollout.data["memory"], recompute(policy, rollout.data)
    assert not torch.equal(start, recomputed)
    start = recomputed if memory_start == "recomputed" else start
    wide = {"clip_low": 0.99, "clip_high": 99.0}
    for length in (1, 4, 24):
        learner = learner_of(policy, memory_start=memory_start, **wide)
        batch = gather(policy, rollout, *targets, Phase(), length=length)
        learner.gradient(rollout, batch, Phase())
        found[length] = {name: p.grad.clone() for name, p in policy.named_parameters().items()}
        for name, expected in by_hand(policy, rollout, targets, length, start).items():
            scale = expected.abs().max()
            assert scale > 1e-4 and (found[length][name] - expected).abs().max() < 2e-5 * scale
    gru = "actor.gru.weight_hh"
    for a, b in ((1, 4), (4, 24)):  # the length of a window matters
        assert (found[a][gru] - found[b][gru]).abs().max() > 1e-2 * found[b][gru].abs().max()


def test_minibatches_are_made_of_whole_windows(rollouts):
    policy, (rollout, _) = recurrent(), rollouts
    batch = gather(policy, rollout, *random_targets(rollout), Phase(), length=4)
    learner, seen = learner_of(policy, num_minibatches=3, micro_batch_size=9), []
    learner.gradient = lambda *inputs: seen.append(inputs[1])
    learner.update(rollout, *random_targets(rollout))
    assert sum(map(len, seen)) == len(batch) == 96
    windows = [set(chunks["window"].tolist()) for chunks in seen]
    assert set.union(*windows) == set(batch["window"].tolist())
    assert sum(map(len, windows)) == len(set.union(*windows))
    order = [chunks["window"].unique_consecutive().tolist() for chunks in seen]
    assert any(numbers != sorted(numbers) for numbers in order)  # drawn at random
    for chunks in seen:
        pieces = list(micro_batches(chunks, 9))
        assert sum(map(len, pieces)) == len(chunks) and max(map(len, pieces)) <= 9
        for piece in pieces:
            for window in piece["window"].unique():
                whole = batch[batch["window"] == window]
                assert torch.equal(piece[piece["window"] == window]["slot"], whole["slot"])


def test_chunks_that_no_loss_needs_only_lead_to_others():
    policy = recurrent()
    (rollout,) = play(policy, goal=9.0)
    advantages, valid, _ = random_targets(rollout)
    keep = valid.clone()
    keep[0] = False
    keep[1, [0, 1, 2, 4, 5, 6, 7]] = False
    phase = Phase(value=False)
    batch = gather(policy, rollout, advantages, keep, None, phase, length=4)
    slots = batch[batch["row"] == 1]["slot"].tolist()
    assert 0 not in batch["row"] and slots == [0, 1, 2, 3, *range(8, 24)]
    assert batch[batch["row"] == 1]["rl"].tolist() == [False] * 3 + [True] * 17
    _, counts = learner_of(policy).gradient(rollout, batch, phase)
    assert counts["policy_loss"] == keep.sum() and counts["value_loss"] == 0


def test_micro_batches_add_up_to_the_whole_batch(rollouts):
    policy, reference, (rollout, _) = recurrent(), recurrent(seed=1), rollouts
    gradients = []
    for size in (4, 7, 1000):
        learner = learner_of(policy, kl_coef=0.1, entropy_coef=0.01)
        learner.config.micro_batch_size = size
        targets = random_targets(rollout)
        batch = gather(policy, rollout, *targets, Phase(), held=True, length=4)
        batch["reference"] = refer(reference, rollout, batch, size)
        learner.gradient(rollout, batch, Phase())
        gradients.append({n: p.grad.clone() for n, p in policy.named_parameters().items()})
    for other in gradients[:2]:
        for name, gradient in gradients[2].items():
            scale = gradient.abs().max()
            assert scale > 1e-5 and (other[name] - gradient).abs().max() <= 1e-7 + 1e-5 * scale


def test_the_reference_remembers_by_itself(rollouts):
    policy, reference, (rollout, _) = recurrent(), recurrent(seed=1), rollouts
    batch = gather(policy, rollout, *random_targets(rollout), Phase(), held=True, length=4)
    found = refer(reference, rollout, batch, 5)
    for row in range(4):
        of_row = batch["row"] == row
        slots, data = batch["slot"][of_row], rollout.data[row]
        before, memory = [], torch.zeros(1, SIZE)
        for t in range(rollout.num_chunks):
            seen = {name: data[name][t : t + 1] for name in rollout.observation}
            before.append(memory)
            memory = reference.remember({**seen, "memory": memory}).detach()
            if rollout.ended[row, t]:
                memory = torch.zeros(1, SIZE)
        seen = {name: data[name][slots] for name in rollout.observation}
        seen["memory"] = torch.cat(before)[slots]
        expected = reference.distribution(seen, [""] * len(slots))[0].log_prob(
            data["sample"][slots]
        )
        torch.testing.assert_close(found[of_row], expected, atol=1e-5, rtol=1e-5)
        assert (seen["memory"] - data["memory"][slots]).abs().max() > 1e-2


def test_what_is_recomputed_is_what_the_policy_would_remember_now(rollouts):
    first, second = map(part_of, rollouts)
    kept = second.data["memory"]
    torch.testing.assert_close(recompute(recurrent(), second.data), kept, atol=1e-6, rtol=0)
    other = recurrent(seed=1)
    for rollout in (first, second):
        fresh = recompute(other, rollout.data)
        for row in range(4):
            start = rollout.data["memory"][row, :1], rollout.data["previous_action"][row, :1]
            before, _, _ = replayed(other, rollout, row, *start)
            torch.testing.assert_close(fresh[row], before, atol=1e-6, rtol=0)
        assert (fresh - rollout.data["memory"]).abs().max() > 1e-2
    # Chunks that are not valid are passed over; behind them starts what is stored.
    second.data["valid"][2, 5] = False
    fresh = recompute(other, second.data)
    assert torch.equal(fresh[2, 5:7], second.data["memory"][2, 5:7])
    assert not torch.equal(recompute(other, first.data)[2], first.data["memory"][2])


def test_the_first_rollout_is_remembered_with_the_normaliser_that_it_gives(rollouts):
    policy, rollout = recurrent(), part_of(rollouts[0])
    policy.begin(rollout.data, ProcessGroup())
    assert (rollout.data["memory"] - rollouts[0].data["memory"]).abs().max() > 1e-2
    for row in range(4):
        torch.testing.assert_close(
            rollout.data["memory"][row], replayed(policy, rollout, row)[0], atol=1e-6, rtol=0
        )


def test_two_processes_equal_one(rollouts, tmp_path):
    rollout, _ = rollouts
    settings = {"learning_rate": 3e-3, "epochs": 2, "num_minibatches": 3, "value_epochs": 1}

    def learn(among, rows):
        policy = recurrent(seed=among.rank)
        learner = learner_of(policy, group=among, memory_start="recomputed", **settings)
        targets = (target[rows] for target in random_targets(rollout))
        return policy.state_dict(), learner.update(part_of(rollout, rows), *targets)

    halves = slice(0, 1), slice(1, 4)
    found = two_processes(tmp_path, lambda among: learn(among, halves[among.rank]))
    assert_as_one(found, learn(ProcessGroup(), slice(0, 4)), updates=6)
