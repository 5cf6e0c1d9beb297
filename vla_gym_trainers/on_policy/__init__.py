"""PPO and GRPO on a VLA's own action tokens.

Data flows one way::

    policy.TokenPolicy        a TokenVLA that acts and is differentiated
    rollout                   what a rollout holds: a TensorDict [rows, chunks]
    collector, overlapped     play the vector environment with the policy
    advantages, losses        pure functions
    learner.Learner           minibatches, exact gradient accumulation, the optimiser
    phases                    cloning of a teacher, transition, RL: by control steps
    distributed               sums over processes
    train                     ``vla-gym-train ppo|grpo``: one run directory
"""

from __future__ import annotations
