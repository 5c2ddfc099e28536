"""Text samples: what the model writes at the end of a training, so that a person can read what it has learned."""

from __future__ import annotations

import shlex

from megatron.checkpoint.huggingface.config import vocabulary_of
from megatron.config import Config
from megatron.errors import ConfigError
from megatron.generate.sampling import Sampling
from megatron.generate.text import Prompts, TextGenerator, with_gaps_filled
from megatron.models.common.generation import stage_of
from megatron.training.trainer import Callback

TEMPERATURE = 0.7
"""Drawn with the run's seed: the same text in every layout."""

MOST_TOKENS = 128
"""Of the text behind a prompt; fewer where the prompt leaves less of a training sample."""


class TextSamples(Callback):
    """Shows how the model goes on from ``--sample-prompts``, or how an encoder-decoder fills their gaps. Collective."""

    def __init__(self, config: Config) -> None:
        self.prompts = shlex.split(config.seeing.sample_prompts or "")
        self._sampling = Sampling(temperature=TEMPERATURE, seed=config.run.seed)

    def on_train_start(self) -> None:
        """Check the prompts: what the model cannot take is an error ahead of the training, not behind it."""
        trainer = self.trainer
        vocabulary = vocabulary_of(trainer.config, None)
        if vocabulary is None:
            raise ConfigError(
                "--sample-prompts needs a tokenizer, got none. Name it with --tokenizer-path, or leave the prompts out"
            )
        prompts, length = Prompts(vocabulary.tokenizer, vocabulary.t5), trainer.config.batch.seq_length
        room = length - max(len(prompts.encode(prompt)) for prompt in self.prompts)
        self._writer = TextGenerator(
            stage_of(trainer.engine),
            prompts,
            trainer.world.grid.data,
            max_new_tokens=min(room, MOST_TOKENS) if room > 0 and vocabulary.t5 is None else None,
            sampling=self._sampling,
        )
        self._writer.encoded(self.prompts)

    def on_train_end(self) -> None:
        trainer, writer = self.trainer, self._writer
        if trainer.stop_text:
            return
        with trainer.engine.optimizer.weights_gathered():
            answers = writer.answer(self.prompts)
        for answer in answers:
            prompt, text = answer.prompt, answer.text
            filled = prompt + text if writer.prompts.tokens is None else with_gaps_filled(prompt, text)
            trainer.print_line(f"sample | {filled}")
