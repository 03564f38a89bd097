"""MLflow."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

from mtgrpo.log import Tracker
from mtgrpo.parts import Network, RunContext

_PARAMETERS = 100  # that one request may hold
_LONGEST = 6000  # characters of a parameter's value


@dataclass
class MLflow(Tracker):
    """A run of an MLflow experiment, the `project`, https://mlflow.org."""

    tracking_uri: Network = ""  # http://..., sqlite:///mlflow.db, an ARN of SageMaker; by default MLFLOW_TRACKING_URI

    def begin(self, context: RunContext) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # all conversations wait while it is asked
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Param  # noqa: PLC0415
        from mlflow.tracking import MlflowClient  # noqa: PLC0415

        self._client = client = MlflowClient(self.tracking_uri or None)

        def new() -> str:
            found = client.get_experiment_by_name(self.project)
            experiment = found.experiment_id if found else client.create_experiment(self.project)
            return client.create_run(experiment, run_name=self.name).info.run_id

        self._id = self.kept_id(context.folder / "mlflow.id", new)
        client.update_run(self._id, "RUNNING")
        known = client.get_run(self._id).data.params  # which cannot be changed
        new_ones = [Param(key, value[:_LONGEST]) for key, value in context.settings.items() if key not in known]
        for start in range(0, len(new_ones), _PARAMETERS):
            client.log_batch(self._id, params=new_ones[start : start + _PARAMETERS])

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric  # noqa: PLC0415

        now_ms = int(time.time() * 1000)
        # "@" is the one sign in our names that MLflow has none of
        rows = [Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def end(self) -> None:
        self._client.set_terminated(self._id)
