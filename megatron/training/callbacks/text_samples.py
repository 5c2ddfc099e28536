"""TextSamples: prints text that the model generates at the end of training."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from megatron import log
from megatron.checkpoint.huggingface.tokenizer import vocabulary_of
from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.generate.sampling import Sampling
from megatron.generate.text import Prompts, TextGenerator, fill_gaps
from megatron.models.common.generation import get_model_stage
from megatron.mpu.groups import SINGLE
from megatron.training.trainer import Callback

TEMPERATURE = 0.7
"""Sampling temperature. Tokens are drawn with the run's seed, so the text is the same in every layout."""

MAX_NEW_TOKENS = 128
"""Maximum number of tokens generated for a prompt."""


class TextSamples(Callback):
    """Prints the model's continuations of ``--sample-prompts``; an encoder-decoder fills their gaps. Collective."""

    def __init__(self, config: Config) -> None:
        self.prompts = shlex.split(config.logging.sample_prompts or "")
        self._sampling = Sampling(temperature=TEMPERATURE, seed=config.run.seed)

    def on_train_start(self) -> None:
        """Check the prompts, so that errors in them are raised before training rather than after it.

        Invalid default prompts raise no error; they are dropped, with a log message.

        Raises:
            ConfigError, DataError: prompts set with --sample-prompts are invalid.
        """
        try:
            self._generator = self._make_generator()
        except (ConfigError, DataError) as error:
            if "sample_prompts" in self.trainer.config.explicit_fields:
                raise
            log.info(f"no text samples will be generated at the end: {error}")
            self.prompts = []

    def _make_generator(self) -> TextGenerator:
        """Build the generator for the continuations, after encoding the prompts as a check."""
        trainer = self.trainer
        vocabulary = vocabulary_of(trainer.config, None)
        if vocabulary is None:
            raise ConfigError(
                "--sample-prompts needs a tokenizer, got none. Set --tokenizer-path, or leave --sample-prompts out"
            )
        prompts = Prompts(vocabulary.tokenizer, vocabulary.t5, adds_bos=_adds_bos(trainer.config))
        grid = trainer.world.grid
        rows = [prompts.encode(prompt) for prompt in self.prompts]
        generator = TextGenerator(
            get_model_stage(trainer.engine),
            prompts,
            SINGLE if grid.expert.size > 1 else grid.data,  # with expert parallelism all ranks generate in lockstep
            max_new_tokens=num_new_tokens(trainer.config.batch.seq_length, rows) if vocabulary.t5 is None else None,
            sampling=self._sampling,
        )
        generator.encode(self.prompts)
        return generator

    def on_train_end(self) -> None:
        trainer = self.trainer
        if trainer.stop_text or not self.prompts:
            return
        generator = self._generator
        with trainer.engine.optimizer.store.full_weights():
            answers = generator.answer(self.prompts)
        for answer in answers:
            prompt, text = answer.prompt, answer.text
            filled = prompt + text if generator.prompts.t5_tokens is None else fill_gaps(prompt, text)
            trainer.print_line(f"sample | {filled}")


def _adds_bos(config: Config) -> bool | None:
    """Return ``adds_bos`` for the prompts: False with --no-prompt-bos, otherwise None (the tokenizer's default)."""
    return None if config.logging.prompt_bos else False


def num_new_tokens(seq_length: int, prompts: Iterable[Sequence[int]]) -> int | None:
    """Return the new-token count per prompt, within the training sequence length; None if none fit."""
    num_free = seq_length - max(map(len, prompts))
    return min(num_free, MAX_NEW_TOKENS) if num_free > 0 else None
