"""PPO and GRPO on a VLA's own action tokens.

Data flows one way::

    policy.TokenPolicy         a TokenVLA that acts and is differentiated
    teacher.MixedActor         teacher and student acting by turns
    rollout.Rollout            what was played: a TensorDict [rows, chunks]
    collector, source          play the vector environment, now or beside learning
    targets, advantages        from rewards to advantages
    learner.Learner, losses    minibatches, exact gradient accumulation, the optimiser
    phases, validation         cloning, transition, RL; student against teacher
    distributed                sums over processes
    parts, loop, train         ``vla-gym-train ppo | grpo``: one run directory
"""

from __future__ import annotations
