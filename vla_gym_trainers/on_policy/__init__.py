"""PPO and GRPO on one interface of a stochastic policy, over a VLA's tokens or over corrections.

Data flows one way::

    distributions, policy      what is drawn: sample, log-probability, entropy, value
    vla_policy                 the VLA itself: tokens, a normal distribution, a noisy flow
    rl_token_actor, _policy    a Gaussian over corrections of the frozen VLA's chunk
    phases                     cloning, transition, RL; teacher and student acting by turns
    rollout, collector         what was played: a TensorDict [rows, chunks]
    targets                    from rewards to advantages
    recurrence                 a policy's memory while it learns, in windows of chunks
    minibatches, gradients     exact accumulation of the losses' gradients
    learner                    minibatches, steps of the optimiser
    formulas                   every equation of the two
    loop                       collect, advantages, update; validation; checkpoints
    train                      ``vla-gym-train ppo | grpo``: one run directory
"""
