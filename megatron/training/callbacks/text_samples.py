"""Text samples: what the model writes at the end of a training, so that a person can read what it has learned."""

from __future__ import annotations

import shlex

from megatron.checkpoint.huggingface.config import vocabulary_of
from megatron.config import Config
from megatron.generate.sampling import Sampling
from megatron.generate.text import Prompts, TextGenerator, with_gaps_filled
from megatron.models.common.generation import stage_of
from megatron.training.trainer import Callback

TEMPERATURE = 0.7
"""Drawn with the run's seed: the same text in every layout."""


class TextSamples(Callback):
    """Shows how the model goes on from ``--sample-prompts``, or how an encoder-decoder fills their gaps. Collective."""

    def __init__(self, config: Config) -> None:
        self.prompts = shlex.split(config.seeing.sample_prompts or "")
        self._sampling = Sampling(temperature=TEMPERATURE, seed=config.run.seed)

    def on_train_end(self) -> None:
        trainer = self.trainer
        vocabulary = vocabulary_of(trainer.config, None)
        if trainer.stop_text or vocabulary is None:
            return
        writer = TextGenerator(
            stage_of(trainer.engine),
            Prompts(vocabulary.tokenizer, vocabulary.t5),
            trainer.world.grid.data,
            sampling=self._sampling,
        )
        with trainer.engine.optimizer.weights_gathered():
            answers = writer.answer(self.prompts)
        for answer in answers:
            prompt, text = answer.prompt, answer.text
            trainer.print_line(f"sample | {prompt + text if vocabulary.t5 is None else with_gaps_filled(prompt, text)}")
