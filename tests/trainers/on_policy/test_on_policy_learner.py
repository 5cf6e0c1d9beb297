"""The learner: exact accumulation, clipping and skipping, early stop, what each loss moves."""

import pytest
import torch
from on_policy_toys import collected, moved, part_of, random_targets, shuffled, tiny_policy

from vla_gym.errors import ConfigError
from vla_gym_trainers.on_policy.config import PPOConfig
from vla_gym_trainers.on_policy.learner import Learner
from vla_gym_trainers.on_policy.minibatches import gather, refer
from vla_gym_trainers.on_policy.phases import Phase
from vla_gym_trainers.on_policy.vla_policy import TokenPolicy


@pytest.fixture(scope="module")
def rollout():
    return shuffled(collected(tiny_policy(value=True)))


def learner_of(policy=None, **settings):
    policy = policy or tiny_policy(value=True)
    config = PPOConfig(**{"learning_rate": 1e-2, "seed": 3, **settings})
    return Learner(policy, config)


def test_micro_batches_add_up_to_the_whole_batch(rollout):
    # Every loss at once; tokens masked, two instructions, 9 chunks: no size divides them.
    rollout = part_of(rollout)
    rollout.data["valid"][:, 2:] = False
    rollout.data["valid"][1:, 1] = False
    assert rollout.data["valid"].sum() == 9
    results = {}
    for size in (2, 8, 1000):
        policy = tiny_policy(value=True)
        settings = {"num_minibatches": 1, "entropy_coef": 0.01, "kl_coef": 0.1}
        learner = learner_of(policy, micro_batch_size=size, **settings)
        targets, weights = random_targets(rollout), Phase(cloning=0.5)
        # Away from the behaviour policy: ratios differ from 1, and adapters' B from 0.
        learner.update(rollout, *targets, weights)
        batch = gather(policy, rollout, *targets, weights, held=True)
        batch["reference"] = refer(learner.reference, rollout, batch, size)
        learner.gradient(rollout, batch, weights)
        gradient = {k: p.grad.clone() for k, p in policy.named_parameters().items()}
        learner.optimizer.step()
        results[size] = gradient, policy.state_dict()
    gradient, state = results.pop(1000)
    assert all(g.abs().max() > 1e-5 for g in gradient.values())
    for other_gradient, other_state in results.values():
        for name in gradient:
            scale = gradient[name].abs().max()
            assert (other_gradient[name] - gradient[name]).abs().max() <= 1e-6 + 1e-5 * scale
            torch.testing.assert_close(other_state[name], state[name], atol=2e-5, rtol=1e-4)


def test_teachers_chunks_and_dropped_rows_are_not_reinforced(rollout):
    advantages, keep, _ = random_targets(rollout)
    rollout = part_of(rollout)
    rollout.data["by_teacher"][:4] = True
    keep = keep.clone()
    keep[6:] = False
    policy = tiny_policy()
    batch = gather(policy, rollout, advantages, keep, None, Phase())
    assert set(batch["row"].tolist()) == {4, 5}
    everything = gather(policy, rollout, advantages, keep, None, Phase(cloning=1.0))
    assert len(everything) == rollout.data["valid"].sum()
    assert set(everything["row"][everything["rl"]].tolist()) == {4, 5}
    nothing = gather(policy, rollout, advantages, keep & False, None, Phase())
    assert len(nothing) == 0
    learner = learner_of()
    metrics = learner.update(rollout, advantages, keep & False, None)
    assert metrics["train/updates"] == 0 and learner.updates == 0


def test_each_loss_moves_what_it_should(rollout):
    for weights, vla, head in (
        (Phase(value=False), True, False),
        (Phase(rl=False), False, True),
        (Phase(rl=False, value=False, cloning=1.0), True, False),
    ):
        policy = tiny_policy(value=True)
        before = policy.state_dict()
        metrics = learner_of(policy).update(rollout, *random_targets(rollout), weights)
        names = moved(policy, before)
        assert any(n.startswith("vla.") for n in names) == vla
        assert any(n.startswith("value_head.") for n in names) == head
        assert ("train/policy_loss" in metrics) == weights.rl
        assert ("train/value_loss" in metrics) == weights.value
        assert ("train/cloning_loss" in metrics) == (weights.cloning > 0)
        assert metrics["train/updates"] == 4


def test_weights_may_change_the_step_size(rollout):
    steps = []
    for rate in (None, 1e-4):
        policy = tiny_policy(value=True)
        before = policy.state_dict()
        weights = Phase(learning_rate=rate, num_minibatches=1)
        learner = learner_of(policy)
        learner.update(rollout, *random_targets(rollout), weights)
        after = policy.state_dict()
        steps.append(max(float((after[k] - before[k]).abs().max()) for k in before if "vla" in k))
    # Adam's first step is at most the learning rate, and nearly that where the gradient is large.
    assert 0.9e-2 < steps[0] <= 1.001e-2 and 0.9e-4 < steps[1] <= 1.001e-4
    # 0 is a step size too.
    policy = tiny_policy()
    state = {k: v.clone() for k, v in policy.state_dict().items()}
    learner_of(policy).update(rollout, *random_targets(rollout), Phase(learning_rate=0.0))
    assert not moved(policy, state)
    # A share is of all step sizes.
    learner = learner_of()
    found = learner.update(rollout, *random_targets(rollout), Phase(rate_share=0.5))
    rates = [group["lr"] for group in learner.optimizer.param_groups]
    assert rates == [5e-3, 5e-4] and found["train/learning_rate"] == 5e-3


def test_gradients_are_clipped(rollout):
    learner = learner_of(max_grad_norm=1e-3, num_minibatches=1)
    metrics = learner.update(rollout, *random_targets(rollout))
    assert metrics["train/grad_norm"] > 0.01
    grads = [p.grad for p in learner.parameters if p.grad is not None]
    assert float(torch.nn.utils.get_total_norm(grads)) == pytest.approx(1e-3, rel=1e-2)


def test_an_update_with_a_huge_norm_is_skipped_and_counted(rollout):
    policy = tiny_policy(value=True)
    learner = learner_of(policy, skip_factor=5.0, num_minibatches=1, learning_rate=1e-5)
    advantages, keep, _ = random_targets(rollout)
    for _ in range(5):
        assert learner.update(rollout, advantages, keep)["train/updates_skipped"] == 0
    before = policy.state_dict()
    metrics = learner.update(rollout, 1000.0 * advantages, keep)
    assert metrics["train/updates_skipped"] == 1 and metrics["train/updates"] == 0
    assert (learner.skipped, learner.updates) == (1, 5) and not moved(policy, before)
    advantages[keep.nonzero()[0][0], 0] = float("nan")
    assert learner.update(rollout, advantages, keep)["train/updates_skipped"] == 1
    assert not moved(policy, before)
    assert learner.update(rollout, random_targets(rollout)[0], keep)["train/updates"] == 1


def test_large_norms_that_become_usual_are_learnt_from_again(rollout):
    learner = learner_of(skip_factor=5.0, num_minibatches=1, learning_rate=1e-5)
    advantages, keep, _ = random_targets(rollout)
    for _ in range(5):
        learner.update(rollout, advantages, keep)
    done = [learner.update(rollout, 1e3 * advantages, keep)["train/updates"] for _ in range(6)]
    assert done[0] == 0 and done[-1] == 1


def test_kl_stops_the_update(rollout):
    advantages, keep, _ = random_targets(rollout)
    results = []
    for target in (None, 1e-4):
        learner = learner_of(epochs=3, num_minibatches=2, target_kl=target)
        results.append(learner.update(rollout, advantages, keep))
    free, stopped = results
    assert free["train/updates"] == 6 and free["train/kl_stop"] == 0 and free["train/kl"] > 1e-4
    # The first minibatch has KL 0; the second one has moved by a whole step.
    assert stopped["train/updates"] == 1 and stopped["train/kl_stop"] == 1


def test_the_reference_holds_what_has_no_contrast(rollout):
    """Nothing is kept of the rollout: the KL alone brings the student's chunks back."""
    advantages, keep, _ = random_targets(rollout)
    rollout = part_of(rollout)
    rollout.data["by_teacher"][0] = True
    valid = rollout.data["valid"]
    policy = tiny_policy()
    learner = learner_of(policy, learning_rate=1e-3, kl_coef=0.1, seed=0)
    reference = learner.reference
    batch = gather(policy, rollout, advantages, keep & False, None, Phase(), held=True)
    assert bool(batch["held"].all()) and not batch["rl"].any()
    assert len(batch) == valid[1:].sum() and 0 not in batch["row"]
    for parameter in policy.named_parameters().values():
        parameter.data += 0.05 * torch.randn(
            parameter.shape, generator=torch.Generator().manual_seed(0)
        )
    found = refer(reference, rollout, batch, 3)
    for i in range(len(batch)):  # each chunk has its own, whatever the order they were played in
        one = batch[i : i + 1]
        alone = reference.distribution(*rollout.inputs(one))[0].log_prob(one["sample"])
        torch.testing.assert_close(found[i], alone[0], atol=1e-5, rtol=1e-5)
    seen = [
        learner.update(rollout, advantages, keep & False)["train/reference_kl"] for _ in range(10)
    ]
    assert seen[0] > 1e-3 and seen[-1] < 0.5 * seen[0] and learner.updates == 40


def test_mistakes_are_named():
    frozen = TokenPolicy(tiny_policy().vla)
    frozen.vla.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="Nothing of the policy is trained: give --heads"):
        learner_of(frozen)
