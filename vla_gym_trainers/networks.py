"""Networks of TD3+BC on RL tokens: normaliser, chunk actor, critic ensemble.

Shapes: B batch, D size of the RL token, P size of proprio, C chunk length, N size of an action,
A = C * N, n critics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, one_hot

from vla_gym_trainers.runs.torch_helpers import fast_bf16
from vla_gym_trainers.world_model.protocol import WORLD_MEMORY

#: Standardised values are clamped to [-LIMIT, LIMIT].
LIMIT = 8.0


class FeatureNormalizer(nn.Module):
    """State ``x = (z_rl, proprio, world memory, task)``, standardised by the warm-up.

    Where the task is one of n, it has n numbers, all 0 but its own, ``sqrt(n)``, whose square is 1
    on average as that of the others.

    Attributes:
        state_dim: Size of x.
        inputs: Names of the observations that it is made of.
        sizes: Sizes of those that are standardised, all but the task.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self,
        token_dim: int,
        proprio_dim: int,
        use_token: bool = True,
        world_memory_dim: int = 0,
        num_tasks: int = 0,
    ) -> None:
        """Start as the identity; :meth:`fit` sets the statistics once.

        Args:
            token_dim: D.
            proprio_dim: P.
            use_token: False leaves the token out.
            world_memory_dim: Size S of a world model's memory; 0: there is none.
            num_tasks: Number of tasks that x tells apart; 0: it does not say which it is.
        """
        super().__init__()
        self.token_dim, self.num_tasks = token_dim, num_tasks
        self.first = 0 if use_token else token_dim
        sizes = {"rl_token": token_dim, "proprio": proprio_dim}
        if world_memory_dim:
            sizes[WORLD_MEMORY] = world_memory_dim
        self.inputs, self.sizes = tuple(sizes), tuple(sizes.values())
        if num_tasks:
            self.inputs += ("task_id",)
        self.state_dim = sum(self.sizes) - self.first + num_tasks
        self.register_buffer("mean", torch.zeros(sum(self.sizes)))
        self.register_buffer("scale", torch.ones(sum(self.sizes)))

    @torch.no_grad()
    def fit(self, observation: Mapping[str, Tensor]) -> None:
        """Set mean and scale from data: ``inputs`` of N observations."""
        data = self._joined(observation).double()
        std = data.std(dim=0, unbiased=False)
        # Floors: a token dimension that hardly varies is noise and must not be blown up to 1.
        std[: self.token_dim] += 0.05 * std[: self.token_dim].max() + 1e-6
        std[self.token_dim :] += 1e-3
        self.mean.copy_(data.mean(dim=0))
        self.scale.copy_(std)

    def forward(self, observation: Mapping[str, Tensor]) -> Tensor:
        """Return x, (B, state_dim) float32.

        Args:
            observation: ``rl_token`` (B, D), ``proprio`` (B, P), and of a normaliser with a world
                memory ``world_memory`` (B, S), with tasks ``task_id`` (B,) or (B, 1) below their
                number.
        """
        x = ((self._joined(observation) - self.mean) / self.scale).clamp(-LIMIT, LIMIT)
        x = x[:, self.first :]
        if not self.num_tasks:
            return x
        tasks = observation["task_id"].reshape(-1).long()
        return torch.cat([x, self.num_tasks**0.5 * one_hot(tasks, self.num_tasks)], dim=1)

    def _joined(self, observation: Mapping[str, Tensor]) -> Tensor:
        standardised = self.inputs[: len(self.sizes)]
        return torch.cat([observation[name].float() for name in standardised], dim=1)


def reference_chunk(observation: dict[str, Tensor]) -> Tensor:
    """Return the VLA's own chunk of an observation, flattened to (B, A)."""
    return observation["vla_action"].float().flatten(1)


class ChunkActor(nn.Module):
    """``mu(x, a~) = clip(a~ + s * tanh(f(x, m * a~, m)))``: a residual over the VLA's chunk.

    The last layer of f starts at zero, so the untrained actor is the VLA to the last bit. ``m`` is
    the reference-dropout mask (0 hides the reference from f in training, 1 otherwise). Because the
    residual is added to the reference in any case, dropout hides only the network's input: f has to
    find its correction from x alone half of the time, but the policy always follows the VLA.
    ``residual_basis = K > 0`` restricts the correction to K smooth functions of time inside the
    chunk (constant, linear, ...: cosines), i.e. N * K numbers in place of N * C.

    ``plain`` is the mean of RL Token's actor (arXiv 2604.23073), ``mu = tanh(f(x, m * a~, m))``:
    f gives the whole chunk, and where ``m`` is 0 nothing of the reference reaches it. Untrained it
    is zero, not the VLA; it has to be cloned first.
    """

    basis: Tensor
    residual_limit: Tensor

    def __init__(
        self,
        state_dim: int,
        chunk_len: int,
        net_arch: Sequence[int],
        residual_limit: Tensor,
        residual_basis: int = 0,
        use_reference: bool = True,
        plain: bool = False,
    ) -> None:
        """Build the network.

        Args:
            state_dim: Size of x.
            chunk_len: C.
            net_arch: Widths of the hidden layers.
            residual_limit: (N,) largest correction per action dimension, ``s`` above.
            residual_basis: Number of time functions (never more than C), 0 for one number per
                control step.
            use_reference: False: f sees x alone, never the chunk that it corrects.
            plain: f gives the chunk, not its correction; ``residual_limit`` and ``residual_basis``
                then have no effect.
        """
        super().__init__()
        if plain:
            residual_limit, residual_basis = torch.ones_like(residual_limit), 0
        self.chunk_len, self.use_reference, self.plain = chunk_len, use_reference, plain
        self.action_size = action_size = len(residual_limit)
        rank = min(residual_basis or chunk_len, chunk_len)
        widths = [state_dim + (chunk_len * action_size + 1) * use_reference, *net_arch]
        layers: list[nn.Module] = []
        for width_in, width_out in zip(widths[:-1], widths[1:], strict=True):
            layers += [nn.Linear(width_in, width_out), nn.ReLU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(widths[-1], rank * action_size)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        time = (torch.arange(chunk_len) + 0.5) / chunk_len
        basis = torch.stack([torch.cos(torch.pi * k * time) for k in range(rank)])
        self.register_buffer("basis", basis if residual_basis else torch.eye(chunk_len))
        self.register_buffer("residual_limit", residual_limit)

    def forward(self, x: Tensor, reference: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return the mean chunk.

        Args:
            x: (B, state_dim) normalised state.
            reference: (B, A) the VLA's chunk.
            keep: (B, 1) 0 where the reference is hidden from the network; None keeps all.

        Returns:
            (B, A) in [-1, 1].
        """
        return self.chunk(self.coefficients(x, reference, keep), reference)

    def coefficients(self, x: Tensor, reference: Tensor, keep: Tensor | None = None) -> Tensor:
        """Return what f gives, (B, K, N) in [-1, 1]; arguments as in :meth:`forward`."""
        if keep is None:
            keep = torch.ones(len(x), 1, device=x.device)
        seen = torch.cat([x, reference * keep, keep], dim=1) if self.use_reference else x
        return torch.tanh(self.head(self.body(seen))).unflatten(1, (-1, self.action_size))

    def chunk(self, coefficients: Tensor, reference: Tensor) -> Tensor:
        """Return the chunk (B, A) that coefficients (B, K, N) make of the reference (B, A)."""
        given = torch.einsum("bkd,kt->btd", coefficients, self.basis) * self.residual_limit
        chunk = given.flatten(1)
        return chunk if self.plain else (reference + chunk).clamp(-1.0, 1.0)


class CriticEnsemble(nn.Module):
    """n independent Q(x, a), evaluated as one batched product per layer, with LayerNorm."""

    def __init__(
        self,
        state_dim: int,
        action_size: int,
        net_arch: Sequence[int],
        num_critics: int,
        bf16: bool = False,
    ) -> None:
        """Build the networks.

        Args:
            state_dim: Size of x.
            action_size: A.
            net_arch: Widths of the hidden layers.
            num_critics: n.
            bf16: Multiply in bfloat16, but for the last layer, where the device is fast at it;
                parameters stay float32.
        """
        super().__init__()
        self.num_critics, self.bf16 = num_critics, bf16
        widths = [state_dim + action_size, *net_arch, 1]
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for width_in, width_out in zip(widths[:-1], widths[1:], strict=True):
            bound = width_in**-0.5
            weight = torch.empty(num_critics, width_in, width_out).uniform_(-bound, bound)
            self.weights.append(nn.Parameter(weight))
            self.biases.append(nn.Parameter(torch.zeros(num_critics, 1, width_out)))

    def forward(self, x: Tensor, action: Tensor) -> Tensor:
        """Return (B, n) values of x (B, state_dim) and chunk (B, A)."""
        hidden = torch.cat([x, action], dim=1).expand(self.num_critics, -1, -1)
        bf16 = self.bf16 and fast_bf16(x.device.type)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=bf16):
            for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
                hidden = torch.baddbmm(bias, hidden, weight)
                hidden = layer_norm(hidden, hidden.shape[-1:]).relu()
        # A value rounded to bfloat16 would be off by up to 0.004 at 1, more than chunks differ by.
        return torch.baddbmm(self.biases[-1], hidden.float(), self.weights[-1])[..., 0].T
