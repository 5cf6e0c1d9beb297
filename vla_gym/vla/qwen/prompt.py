"""The QwenOFT prompt: instruction, images and action queries as token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import Struct

from vla_gym.errors import ConfigError, WeightsError
from vla_gym.outside import read_bytes
from vla_gym.vla.files import load_tokenizer, read_json

#: One of these in the prompt for each action of a chunk; the policies read the actions off them.
ACTION_TOKEN = "\N{LEFT-POINTING MAGNIFYING GLASS}"


class Prompt(NamedTuple):
    """One row, without padding.

    Attributes:
        ids: (L,) int64.
        positions: (3, L) int64, the positions of multimodal RoPE.
        queries: (C,) int64: where the action queries are, counted from the end (negative).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    queries: torch.Tensor


class PromptBatch(NamedTuple):
    """Prompts of one length, shorter ones padded on the left.

    Attributes:
        ids: (B, L) int64.
        mask: (B, L) int64, 0 where padded; None if no row is.
        positions: (3, B, L) int64.
        queries: (B, C) int64, indices into L.
    """

    ids: torch.Tensor
    mask: torch.Tensor | None
    positions: torch.Tensor
    queries: torch.Tensor

    def to(self, device: torch.device) -> PromptBatch:
        """Return a copy on a device."""
        return PromptBatch(*(None if x is None else x.to(device) for x in self))  # type: ignore[arg-type]


class QwenPrompts:
    """Builds prompts as AlphaBrain and starVLA do: one user turn, images before the text.

    The text is the instruction, then ``" Please predict the next 8 robot actions: <action>"``,
    the action tokens and ``"<action>."``; a ``CoT_prompt``, if the policy was trained with one, is
    put around all of it, so that words may follow the action tokens.

    Attributes:
        chunk_len: Action tokens of a prompt.
        action_token_id: Their id.
        pad_token_id: Id of the padding.
    """

    def __init__(
        self,
        folder: Path,
        *,
        chunk_len: int,
        cot_prompt: str | None,
        num_images: int,
        tokens_per_image: int,
        image_token_id: int,
        positions: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Load tokenizer and chat template from the VLM's folder.

        ``cot_prompt`` has ``"{instruction}"`` where the text goes; ``positions`` maps ids (L,) to
        positions (3, L).

        Raises:
            WeightsError: If a file is missing or damaged, or there is no such action token.
        """
        self._tokenizer = load_tokenizer(folder)  # Qwen2VLProcessor would ask for torchvision
        self._template = _chat_template(folder, self._tokenizer)
        self._cot_prompt = cot_prompt
        self._images = [{"type": "image"}] * num_images
        self._image_token = self._tokenizer.convert_ids_to_tokens(image_token_id)
        self._tokens_per_image = tokens_per_image
        self._image_token_id = image_token_id
        self._positions = positions
        self._cache: dict[str, Prompt] = {}  # the instructions of a run are few
        self.chunk_len = chunk_len
        self.pad_token_id = int(self._tokenizer.pad_token_id)
        # The authors take the first id too; if it took several, all of them start a token.
        self.action_token_id = self._ids(ACTION_TOKEN)[0]

    def text(self, instruction: str) -> str:
        """Return what the user's turn says after the images."""
        suffix = (
            f" Please predict the next {self.chunk_len} robot actions: "
            f"<action>{ACTION_TOKEN * self.chunk_len}<action>."
        )
        if self._cot_prompt is None:
            return instruction + suffix
        return self._cot_prompt.replace("{instruction}", instruction + suffix)

    def encode(self, instruction: str) -> Prompt:
        """Return an instruction's prompt, remembered for the next time.

        Raises:
            ConfigError: If the instruction spoils the prompt (it holds Qwen's image token).
        """
        if instruction in self._cache:
            return self._cache[instruction]
        content = [*self._images, {"type": "text", "text": self.text(instruction)}]
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": content}],
            chat_template=self._template,
            add_generation_prompt=True,
            tokenize=False,
        )
        text = text.replace(self._image_token, self._image_token * self._tokens_per_image)
        ids = torch.tensor(self._ids(text))
        queries = torch.nonzero(ids == self.action_token_id).flatten()[-self.chunk_len :] - len(ids)
        images = int((ids == self._image_token_id).sum())
        wanted = len(self._images) * self._tokens_per_image
        if len(queries) != self.chunk_len or images != wanted:
            raise ConfigError(
                f"Expected {self.chunk_len} action tokens and {wanted} image tokens in the prompt "
                f"of {instruction!r}, got {len(queries)} and {images}: is this the tokenizer that "
                "the policy was trained with?"
            )
        self._cache[instruction] = Prompt(ids, self._positions(ids), queries)
        return self._cache[instruction]

    def batch(self, prompts: Sequence[Prompt], length: int | None = None) -> PromptBatch:
        """Stack prompts, padded on the left to the longest of them.

        Args:
            prompts: At least one.
            length: Pad to this length instead.

        Raises:
            ConfigError: If a prompt is longer than ``length``.
        """
        longest = max(len(prompt.ids) for prompt in prompts)
        if length is not None and longest > length:
            raise ConfigError(
                f"pad_to={length} is too short: a prompt of this batch has {longest} tokens."
            )
        length = length or longest
        if all(len(prompt.ids) == length for prompt in prompts):
            mask = None  # nothing to hide: the attention may take its fastest kernel
        else:
            mask = torch.stack([_left(torch.ones_like(p.ids), length, 0) for p in prompts])
        return PromptBatch(
            torch.stack([_left(p.ids, length, self.pad_token_id) for p in prompts]),
            mask,
            torch.stack([_left(p.positions, length, 0) for p in prompts], dim=1),
            torch.stack([p.queries + length for p in prompts]),
        )

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _left(x: torch.Tensor, length: int, value: int) -> torch.Tensor:
    return torch.nn.functional.pad(x, (length - x.shape[-1], 0), value=value)


class _Template(Struct):
    chat_template: str


def _chat_template(folder: Path, tokenizer: Any) -> str:
    """Return the processor's template, which is the one that knows images."""
    if (folder / "chat_template.jinja").is_file():
        return read_bytes(folder / "chat_template.jinja", WeightsError).decode(errors="replace")
    if (folder / "chat_template.json").is_file():
        return read_json(folder / "chat_template.json", _Template).chat_template
    if isinstance(tokenizer.chat_template, str):
        return tokenizer.chat_template
    raise WeightsError(f"No chat template in {folder}: expected chat_template.jinja or .json.")
