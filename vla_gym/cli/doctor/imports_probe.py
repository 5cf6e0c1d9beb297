"""A program: imports torch, torchvision and transformers; prints how that went, as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

#: What a vision-language model of transformers needs; a broken torchvision shows only here.
CLASSES = ("PreTrainedModel", "AutoModel", "AutoProcessor")


def attempt(name: str, classes: tuple[str, ...] = ()) -> dict[str, Any]:
    """Import a module and some of its names; return version and error, null where there is none."""
    import importlib

    try:
        module = importlib.import_module(name)
        for member in classes:
            getattr(module, member)
    except ModuleNotFoundError as error:
        missing = error.name == name
        return {"version": None, "error": None if missing else f"ModuleNotFoundError: {error}"}
    except Exception as error:  # a broken library may raise anything
        line = str(error).strip().splitlines()
        return {
            "version": None,
            "error": f"{type(error).__name__}: {line[0] if line else ''}"[:300],
        }
    return {"version": getattr(module, "__version__", "unknown"), "error": None}


def main() -> None:
    """Print the answer: one entry a library, and the names of the CUDA devices."""
    answer: dict[str, Any] = {"torch": attempt("torch"), "cuda": []}
    answer["torchvision"] = attempt("torchvision")
    answer["transformers"] = attempt("transformers", CLASSES)
    if answer["torch"]["version"]:
        import torch

        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            answer["cuda"] = [torch.cuda.get_device_name(i) for i in range(count)]
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # libraries that are broken may crash at exit


if __name__ == "__main__":
    main()
