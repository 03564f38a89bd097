"""TensorBoard."""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from mtgrpo.log import Tracker
from mtgrpo.parts import RunContext


@dataclass
class TensorBoard(Tracker):
    """Event files in the run's folder: tensorboard --logdir RUN, or the folder that holds several runs."""

    def begin(self, context: RunContext) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter  # noqa: PLC0415

        self._writer = SummaryWriter(str(context.folder / "tensorboard"))
        rows = [f"| {escape(name)} | {escape(value)} |" for name, value in context.settings.items()]
        self._writer.add_text("configuration", "\n".join(["| option | value |", "| --- | --- |", *rows]))

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def end(self) -> None:
        self._writer.close()
