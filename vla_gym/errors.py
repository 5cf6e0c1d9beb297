"""Every error that vla_gym raises on purpose: one class per kind of mistake.

Messages follow one pattern: what was expected, what came, what to do.
"""


class VlaGymError(Exception):
    """Base class of every error raised on purpose by this package."""


class UnknownTaskError(VlaGymError, ValueError):
    """A suite name or a task id does not exist."""


class AssetError(VlaGymError, FileNotFoundError):
    """An asset pack is missing, incomplete or not what it claims to be."""


class RLTokenWarning(UserWarning):
    """``rl_token="auto"`` found no encoder for the VLA; the mean hidden state takes its place."""


class CompileError(VlaGymError, RuntimeError):
    """The separate process that compiles a scene failed."""


class InvalidActionError(VlaGymError, ValueError):
    """An action has the wrong shape, the wrong dtype or is not finite."""


class RenderError(VlaGymError, RuntimeError):
    """No usable OpenGL context (EGL missing, no device, out of memory)."""


class WeightsError(VlaGymError, ValueError):
    """A checkpoint is missing, corrupt or belongs to another architecture."""


class NotEnoughMemoryError(VlaGymError, MemoryError):
    """The weights of a model do not fit into the memory of the device."""


class ConfigError(VlaGymError, ValueError):
    """A configuration value is out of range or two values contradict each other."""


class DiskFullError(VlaGymError, OSError):
    """A run could not go on because its disk is full; it can be resumed."""


class BenchError(VlaGymError, RuntimeError):
    """A system under measurement could not be started, failed or gave no answer in time."""


class DemoError(VlaGymError, RuntimeError):
    """A scripted expert failed so often that the demonstrations could not be recorded."""


class WorkerError(VlaGymError, RuntimeError):
    """A worker process failed and is not, or not any more, restarted."""


class WorkerRestartWarning(RuntimeWarning):
    """A worker process died, hung or raised, and a new one took its place."""
