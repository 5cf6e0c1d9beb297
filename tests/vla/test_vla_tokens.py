"""The token head's distribution, other words for instructions, the last block's rows."""

import numpy as np
import pytest
import torch
from mini_vla import random_inputs, small_config

from vla_gym.errors import ConfigError
from vla_gym.suites import suite_tasks
from vla_gym.vla.blocks import Block
from vla_gym.vla.mini.backend import MiniBackend
from vla_gym.vla.mini.model import MiniVLA
from vla_gym.vla.paraphrases import paraphrases
from vla_gym.vla.tokens import WordTokenizer, build_vocabulary, sample_tokens, token_log_probs
from vla_gym_trainers.cloning.data import Sentences


def test_sampling_follows_the_softmax():
    # Probabilities 0.2 and 0.8 at T = 1; at T = 0.5 the odds 1:4 become 1:16.
    logits = torch.full((20_000, 256), -1e9)
    logits[:, 3], logits[:, 7] = np.log(0.2), np.log(0.8)
    for temperature, expected in ((1.0, 0.2), (0.5, 1 / 17)):
        generator = torch.Generator().manual_seed(0)
        tokens = sample_tokens(logits, temperature, generator)
        assert set(tokens.tolist()) == {3, 7}
        assert float((tokens == 3).float().mean()) == pytest.approx(expected, abs=0.01)
        log_probs = token_log_probs(logits[:1], torch.tensor([3]), temperature)
        assert log_probs.item() == pytest.approx(np.log(expected), abs=1e-5)
    assert (sample_tokens(logits, 0.0) == 7).all()
    assert token_log_probs(logits[:1], torch.tensor([7]), 0.0).item() == pytest.approx(np.log(0.8))
    with pytest.raises(ConfigError, match="temperature"):
        sample_tokens(logits, -1.0)


def test_last_rows_of_a_block_equal_the_whole_block():
    torch.manual_seed(0)
    block, x = Block(32, 4), torch.randn(2, 9, 32)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., :4] = False
    torch.testing.assert_close(block(x, mask, last=3), block(x, mask)[:, -3:])


def test_an_instruction_without_words_is_no_nan():
    torch.manual_seed(0)
    backend = MiniBackend(MiniVLA(small_config()))
    images, _, proprio = random_inputs(1)
    empty = backend.infer(images, [""], proprio).hidden
    assert torch.isfinite(empty).all()


def test_paraphrases_name_one_task_each():
    """No sentence belongs to two tasks of a suite, original or not, held out or not."""
    for suite in ("spatial", "object", "goal"):
        seen: dict[str, int] = {}
        for task in suite_tasks(suite):
            trained, held = paraphrases(task.instruction), paraphrases(task.instruction, True)
            assert len(trained) >= 3 and len(held) == 1
            for text in (task.instruction, *trained, *held):
                assert seen.setdefault(text, task.task_id) == task.task_id
                assert "{" not in text and len(text.split()) <= 24
        assert len(seen) >= 50
    assert paraphrases("turn the stove into gold") == []
    two_goals = "turn on the stove and put the moka pot on it"
    assert paraphrases(two_goals) == []


def test_sentences_draw_originals_and_paraphrases_of_the_right_task():
    texts = ["put the bowl on the plate", "fly to the moon", "turn on the stove"]
    every = [*texts, *(other for text in texts for other in paraphrases(text))]
    tokenize = WordTokenizer(build_vocabulary(every), 24)
    sentences = Sentences(texts, tokenize)

    def said(ids):
        words = build_vocabulary(every)
        return [" ".join(words[i] for i in row if i) for row in ids.tolist()]

    tasks = np.repeat([0, 1, 2], 400)
    assert said(sentences.originals(tasks)) == [texts[t] for t in tasks]
    assert sentences.originals(np.array([2])).shape == (1, 4)
    drawn = said(sentences.draw(tasks, 0.5, np.random.default_rng(0)))
    for task, text in enumerate(texts):
        own = drawn[400 * task : 400 * (task + 1)]
        assert set(own) == {text, *paraphrases(text)}
        if task != 1:  # which has none
            assert 160 < own.count(text) < 240
    assert said(sentences.draw(tasks, 0.0, np.random.default_rng(0))) == [texts[t] for t in tasks]
