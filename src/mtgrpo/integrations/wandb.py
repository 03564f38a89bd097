"""Weights & Biases."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from mtgrpo.log import Tracker
from mtgrpo.parts import RunContext, Text


@dataclass
class WandB(Tracker):
    """A run at Weights & Biases, https://docs.wandb.ai; the key is WANDB_API_KEY, or that of `wandb login`.

    The curves of training are over `train/step`, those of the warm start over `sft/step`.
    """

    entity: Text = ""  # a user or team; by default the key's own
    group: Text = ""
    tags: list[Text] = field(default_factory=list[str])
    mode: Text = ""  # online, offline (in the run's folder, for `wandb sync`), disabled; "" = WANDB_MODE, or online

    def begin(self, context: RunContext) -> None:
        import wandb  # noqa: PLC0415

        self._run = wandb.init(
            project=self.project,
            name=self.name,
            entity=self.entity or None,
            group=self.group or None,
            tags=self.tags or None,
            mode=self.mode or None,  # pyright: ignore[reportArgumentType]  (it says itself which there are)
            id=self.kept_id(context.folder / "wandb.id", lambda: uuid.uuid4().hex),
            resume="allow",
            dir=context.folder,
            config=dict(context.settings),
            settings=wandb.Settings(console="off", silent=True),
        )
        self._run.define_metric("*", step_metric="train/step")
        self._run.define_metric("sft/*", step_metric="sft/step")

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        warm = any(name.startswith("sft/") for name in metrics)
        self._run.log({"sft/step" if warm else "train/step": step, **metrics})

    def end(self) -> None:
        self._run.finish()
