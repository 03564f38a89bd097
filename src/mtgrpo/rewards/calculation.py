"""Is the final number right, and which calls of the calculator led there?"""

from dataclasses import dataclass
from typing import Any

from mtgrpo.rewards import Reward, Score, required
from mtgrpo.rewards.numeric import Numeric
from mtgrpo.types import Trajectory


@dataclass
class Calculation(Reward):
    """As `numeric`; beside it every turn whose call gave the next intermediate result is worth 1.

    The results that are looked for, in their order, are the `values` in the task's metadata, as task=calculator has
    them. Used with advantage=turn, return_to_go, gigpo or gae; advantage=trajectory adds the turns' rewards up.
    """

    compares = judges_turns = True

    require_marker: bool = True  # false: where there is neither #### nor a box, the last number of the text counts

    def reward(self, trajectory: Trajectory) -> Score:
        """Raises TaskError when the task names no results, or its answer is not a number."""
        values: Any = trajectory.task.metadata.get("values")
        if values != []:  # nothing is calculated
            values = required(trajectory.task, "values", "calculation", "calculator; for others set reward=numeric")
        results = [str(value) for value in values]
        turns: list[float] = []
        for turn in trajectory.turns:
            brought = bool(results) and results[0] in [message.content for message in turn.observations]
            results = results[brought:]
            turns.append(float(brought))
        return Score(Numeric(require_marker=self.require_marker).reward(trajectory), turns=turns)
