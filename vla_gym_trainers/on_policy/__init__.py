"""PPO and GRPO on one interface of a stochastic policy, over a VLA's tokens or over corrections.

Data flows one way::

    distributions, policy      what is drawn: sample, log-probability, entropy, value
    vla_policy                 the VLA itself: tokens, a normal distribution, a noisy flow
    rl_token_policy            a Gaussian over corrections of the frozen VLA's chunk
    phases                     cloning, transition, RL; teacher and student acting by turns
    rollout, collector         what was played: a TensorDict [rows, chunks]
    targets                    from rewards to advantages
    minibatches, learner       exact gradient accumulation, the optimiser
    formulas                   every equation of the two
    loop                       collect, advantages, update; validation; checkpoints
    train                      ``vla-gym-train ppo | grpo``: one run directory
"""
