"""AttentionLogitLogger: logs the largest attention logit (--log-max-attention-logit, --qk-clip)."""

from __future__ import annotations

from typing import Any

from megatron.training.trainer import Callback


class AttentionLogitLogger(Callback):
    """Logs ``max_attention_logit``, the largest logit of the step over all layers, heads and samples.

    Without QK-clip, only logged steps are measured.
    """

    def on_step_start(self) -> None:
        if (logits := self.trainer.engine.logits) is not None:
            logits.is_enabled = self.trainer.is_log_step

    def on_log(self, metrics: dict[str, Any]) -> None:
        if (logits := self.trainer.engine.logits) is not None:
            metrics["max_attention_logit"] = logits.largest()
