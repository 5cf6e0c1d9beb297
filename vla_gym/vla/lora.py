"""LoRA adapters on a VLA, through peft: add, count, save apart, load, merge."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, structs
from torch import nn

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import FractionBelow1, Object, PositiveFloat, Text, check_fields, to_type
from vla_gym.vla.files import read_json

if TYPE_CHECKING:
    import torch
    from peft import PeftModel

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


Rank = Annotated[int, Meta(ge=1, le=4096)]
Names = Annotated[str, Meta(max_length=4096)] | list[Text] | None


class _AdapterConfig(Struct):
    peft_type: Literal["LORA"]
    r: Rank
    lora_alpha: PositiveFloat
    lora_dropout: FractionBelow1 = 0.0
    base_model_name_or_path: Text | None = None
    target_modules: Names = None
    exclude_modules: Names = None
    modules_to_save: list[Text] | None = None
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, float] = {}
    use_rslora: bool = False
    use_dora: bool = False
    fan_in_fan_out: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    layers_to_transform: int | list[int] | None = None
    layers_pattern: Text | list[Text] | None = None


#: What says nothing about what the adapters compute.
_IGNORED = ("task_type", "inference_mode", "auto_mapping", "revision", "init_lora_weights")


@dataclass(frozen=True)
class LoraSettings:
    """Which modules get adapters, and what size; ``W x`` becomes ``W x + alpha / r * B A x``.

    Attributes:
        r: Rank of A (r, in) and B (out, r); B starts at zero, so nothing changes at first.
        alpha: Scale, see above.
        dropout: On the adapters' input, in ``train()`` mode only.
        target_modules: ``"all-linear"``, or names of modules as peft takes them.
        exclude: Names of modules without adapters, they and all inside of them: heads that the
            loss does not reach.
        train_whole: Names of modules that are trained whole instead and saved with the adapters,
            such as a fresh head.
    """

    r: Rank = 16
    alpha: PositiveFloat = 16.0
    dropout: FractionBelow1 = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    exclude: tuple[str, ...] = ()
    train_whole: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigError if a number is out of range."""
        check_fields(self)


class ParameterCounts(NamedTuple):
    """Numbers of a network's parameters, adapters included."""

    trainable: int
    total: int

    def __str__(self) -> str:
        """Return what training prints."""
        share = 100.0 * self.trainable / max(1, self.total)
        return f"{self.trainable:,} of {self.total:,} parameters are trained ({share:.2f} %)"


def count_parameters(model: nn.Module) -> ParameterCounts:
    """Count the parameters of a network; shared ones count once."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return ParameterCounts(sum(n for n, grad in sizes if grad), sum(n for n, _ in sizes))


class LoraAdapters:
    """Adapters in the network of a backend; see :meth:`add` and :meth:`load`.

    The network is changed in place, so the backend goes on working as before, and everything but
    the adapters (and the modules of ``train_whole``) is frozen.

    Attributes:
        model: The backend's network.
    """

    def __init__(self, model: nn.Module, peft_model: PeftModel) -> None:
        self.model = model
        self._peft = peft_model

    @classmethod
    def add(cls, vla: Any, settings: LoraSettings | None = None) -> LoraAdapters:
        """Put fresh adapters into a backend, which then computes exactly what it did before.

        :func:`vla_gym.vla.load` returns one object to all that ask; train a deep copy of it.

        Args:
            vla: A backend with its network in ``.model``.
            settings: See :class:`LoraSettings`.

        Raises:
            ConfigError: If the backend has no ``.model``, has adapters already, or no module fits.
        """
        from peft import LoraConfig

        settings = settings or LoraSettings()
        model = _network(vla)
        names = [name for name, _ in model.named_modules()]
        for name in (*settings.exclude, *settings.train_whole):
            if not any(_inside(name).fullmatch(known) for known in names):
                raise ConfigError(f"{type(model).__name__} has no module {name!r}.")
        target: Any = settings.target_modules
        alpha: Any = settings.alpha  # a float works; peft's annotation says int
        config = LoraConfig(
            r=settings.r,
            lora_alpha=alpha,
            lora_dropout=settings.dropout,
            target_modules=target if isinstance(target, str) else list(target),
            exclude_modules="|".join(_inside(name).pattern for name in settings.exclude) or None,
            modules_to_save=list(settings.train_whole) or None,
        )
        return cls._inject(vla, model, config)

    @classmethod
    def load(cls, vla: Any, folder: str | Path) -> LoraAdapters:
        """Put saved adapters into a backend with the network that they were trained on.

        Args:
            vla: As for :meth:`add`.
            folder: What :meth:`save` wrote.

        Raises:
            WeightsError: If a file is missing or damaged, was trained on another checkpoint, or
                does not fit the network.
            ConfigError: As :meth:`add`.
        """
        import torch
        from peft import LoraConfig, get_peft_model_state_dict
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        folder = Path(folder)
        if not all((folder / name).is_file() for name in (CONFIG_FILE, WEIGHTS_FILE)):
            raise WeightsError(
                f"No adapters in {folder}: expected {CONFIG_FILE} and {WEIGHTS_FILE}."
            )
        settings = _read_config(folder / CONFIG_FILE, LoraConfig().to_dict())
        base = settings.pop("base_model_name_or_path")  # peft would look it up on the hub
        try:
            config = LoraConfig(**settings)
            state = load_file(folder / WEIGHTS_FILE)
        except (OSError, ValueError, TypeError, SafetensorError) as error:
            raise WeightsError(f"The adapters in {folder} are damaged: {error}") from error
        mine: Any = getattr(vla, "name", None)
        # Only the last part of a path or of a hub's name counts; a snapshot's folder is a hash.
        known = None not in (base, mine) and not re.fullmatch("[0-9a-f]{40}", mine)
        if known and Path(str(base)).name != mine:
            raise WeightsError(
                f"The adapters in {folder} were trained on {base!r}, not on {mine!r}, whose shapes "
                f"may fit all the same: load {base!r}, or, if {mine!r} is the same checkpoint in "
                f"another folder, write its name into {CONFIG_FILE}."
            )
        model = _network(vla)
        adapters = cls._inject(vla, model, config)
        own = get_peft_model_state_dict(adapters._peft, save_embedding_layers=False)
        wanted = {k: v.shape for k, v in own.items()}
        found = {k: v.shape for k, v in state.items()}
        if wrong := sorted(
            k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k)
        ):
            adapters._peft.unload()
            raise WeightsError(
                f"The adapters in {folder} do not fit {type(adapters.model).__name__}; "
                f"{len(wrong)} keys differ in name or shape: {', '.join(wrong[:5])}."
            )
        for key, tensor in state.items():
            if not (tensor.is_floating_point() and tensor.isfinite().all()):
                adapters._peft.unload()
                raise WeightsError(f"The adapters in {folder} have no finite floats in {key}.")
        # Not by peft's setter: it renames keys by transformers' rules for old checkpoints, which
        # hit pi0's projections, and says nothing about keys that then fit nowhere.
        with torch.no_grad():
            for key, tensor in own.items():
                tensor.copy_(state[key])
        return adapters

    @classmethod
    def _inject(cls, vla: Any, model: nn.Module, config: Any) -> LoraAdapters:
        from peft import get_peft_model

        if any("lora_" in name for name, _ in model.named_parameters()):
            raise ConfigError("The VLA has adapters already: merge them first, or take a copy.")
        mode = model.training
        try:
            with warnings.catch_warnings():  # transformers' own deprecations, met by peft
                warnings.simplefilter("ignore", FutureWarning)
                peft_model = get_peft_model(model, config)
        except (ValueError, TypeError, re.error) as error:  # as target_modules "(" raises
            raise ConfigError(f"No adapters in {type(model).__name__}: {error}") from error
        # A path of this machine would be recorded otherwise.
        config.base_model_name_or_path = getattr(vla, "name", type(model).__name__)
        model.train(mode)
        return cls(model, peft_model)

    @property
    def counts(self) -> ParameterCounts:
        """How many parameters are trained."""
        return count_parameters(self.model)

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return what is trained: adapters and modules of ``train_whole``."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def save(self, folder: str | Path) -> None:
        """Write adapter_model.safetensors and adapter_config.json, without the base weights."""
        from peft import get_peft_model_state_dict
        from safetensors.torch import save_file

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = get_peft_model_state_dict(self._peft, save_embedding_layers=False)
        tensors = {k: v.detach().cpu().clone().contiguous() for k, v in state.items()}
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        config = self._peft.peft_config["default"]
        mode, config.inference_mode = config.inference_mode, True
        config.save_pretrained(str(folder))
        config.inference_mode = mode

    def merge(self) -> None:
        """Add the adapters to the weights and remove them: the network is plain again, frozen."""
        self._peft.merge_and_unload()
        self.model.requires_grad_(False)


def _read_config(file: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return peft's arguments; what it would heed beside them must have its default.

    Raises:
        WeightsError: If a value is of another type, or of no use here.
    """
    content = read_json(file, Object)
    arguments = structs.asdict(to_type(content, _AdapterConfig, str(file), WeightsError))
    for name, value in content.items():
        if name in defaults and name not in (*arguments, *_IGNORED) and value != defaults[name]:
            raise WeightsError(
                f"{file}: {name}: expected {defaults[name]!r}, got {value!r:.80}: adapters that "
                "need it are not read."
            )
    return {name: value for name, value in arguments.items() if name != "peft_type"}


def _network(vla: Any) -> nn.Module:
    model = getattr(vla, "model", None)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"Expected a backend with its network in .model, got {type(vla).__name__}."
        )
    return model


def _inside(name: str) -> re.Pattern[str]:
    """Match a module's name, at any depth, and the names of all inside of it."""
    return re.compile(rf"(.*\.)?{re.escape(name)}(\..*)?")
