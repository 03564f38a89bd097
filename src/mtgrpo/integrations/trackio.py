"""Trackio."""

from collections.abc import Mapping
from dataclasses import dataclass

from mtgrpo.log import Tracker
from mtgrpo.parts import Network, RunContext


@dataclass
class Trackio(Tracker):
    """A run of Trackio, https://huggingface.co/docs/trackio, kept on this machine under TRACKIO_DIR: `trackio show`."""

    space_id: Network = ""  # a Space at Hugging Face that shows it, such as me/runs

    def begin(self, context: RunContext) -> None:
        import trackio  # noqa: PLC0415

        self._run = trackio.init(
            self.project,
            self.name,
            space_id=self.space_id or None,
            config=dict(context.settings),
            resume="never",  # else it goes on in the newest run of this name, which may be another
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._run.id = self.kept_id(context.folder / "trackio.id", lambda: self._run.id)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step)

    def end(self) -> None:
        self._run.finish()
