"""The world that a command plays in: options that all commands share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from vla_gym.assets.pack import default_assets
from vla_gym.outside import PositiveInt, check_fields
from vla_gym.variation import DomainVariation


@dataclass(kw_only=True)
class EnvSettings:
    """The world that episodes are played in."""

    assets: str = field(default_factory=default_assets)
    """Asset pack: lite, libero, or a path."""
    physics: Literal["fast", "exact"] = "fast"
    """Physics mode."""
    variation: str | None = None
    """How light, cameras, colours and clutter vary: mild or strong; where a policy is trained, in
    training alone."""
    scene_reset_interval: PositiveInt = 1
    """Episodes in a row that share a look."""

    def check_env(self) -> None:
        """Check all options against their types, and how scenes vary.

        Raises:
            ConfigError: If a value is of another type or out of bounds, or there is no such level.
        """
        check_fields(self)
        DomainVariation.parse(self.variation)

    @property
    def episodes_a_look(self) -> int | None:
        """Episodes in a row that share a look; None where nothing varies."""
        return self.scene_reset_interval if DomainVariation.parse(self.variation) else None

    def own_look(self) -> dict[str, Any]:
        """Return the arguments of environments in which nothing varies."""
        return {"assets": self.assets, "physics": self.physics}

    def env_kwargs(self) -> dict[str, Any]:
        """Return the arguments of environments."""
        look = {"variation": self.variation, "scene_reset_interval": self.scene_reset_interval}
        return self.own_look() | look

    def world_facts(self) -> dict[str, Any]:
        """Return what was played in, for a result card.

        Raises:
            AssetError: If the asset pack is missing.
        """
        from vla_gym.assets import resolve_asset_pack

        pack = resolve_asset_pack(self.assets)
        facts = {"asset_pack": pack.name, "asset_pack_digest": pack.digest}
        return facts | {k: v for k, v in self.env_kwargs().items() if k != "assets"}
