"""Tiny OpenVLA checkpoints in the published layout, and what the reference made of them."""

import json
from pathlib import Path

import numpy as np
import tokenizers
import torch

GOLDEN = Path(__file__).parents[1] / "golden" / "openvla"
CHECKPOINT = GOLDEN / "oft"
EMPTY = 29871
#: Cases of the reference: views, and the files that a checkpoint of that kind lacks.
CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "l1_2img_proprio": (2, ()),
    "l1_1img": (1, ("proprio_projector",)),
    "tokens_1img": (1, ("proprio_projector", "action_head")),
}

#: Ids of the words of some prompts, as an arbitrary but real tokenizer.
WORDS = (
    "In What action should the robot take to : ? open middle drawer of cabinet put bowl on stove "
    "top and inside push plate front wine bottle rack cream cheese in turn Out it"
).split()


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json with Llama's <s> before every text; ids are below 1000."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {word: 500 + i for i, word in enumerate(dict.fromkeys(WORDS))}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    file = folder / "tokenizer.json"
    tokenizer.save(str(file))
    return file


def make_checkpoint(folder: Path, without: tuple[str, ...] = (), **changes) -> Path:
    """Link the golden checkpoint into a folder, with a tokenizer and changes in config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in CHECKPOINT.iterdir():
        left_out = any(word in file.name for word in without)
        if file.suffix != ".npz" and file.name != "config.json" and not left_out:
            (folder / file.name).symlink_to(file)
    config = json.loads((CHECKPOINT / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    return folder


def make_checkpoints(root: Path) -> dict[str, Path]:
    """Make a checkpoint for each case."""
    return {case: make_checkpoint(root / case, without) for case, (_, without) in CASES.items()}


class Reference:
    """Arrays of a reference.npz; inputs and results of the three samples, batched."""

    def __init__(self, name: str) -> None:
        self.arrays = dict(np.load(GOLDEN / name / "reference.npz"))

    def of(self, case: str, what: str) -> np.ndarray:
        prefix = f"{case}_" if case else ""
        return np.stack([self.arrays[f"{prefix}{i}_{what}"] for i in range(3)])

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [(*map(int, self.arrays[f"input_ids_{i}"]), EMPTY) for i in range(3)]

    def pixels(self, views: int) -> torch.Tensor:
        return torch.from_numpy(self.arrays["pixel_values"][:, : 6 * views]).float()


def gap(found, wanted) -> float:
    """The largest difference."""
    return float(np.abs(np.asarray(found) - np.asarray(wanted)).max())
