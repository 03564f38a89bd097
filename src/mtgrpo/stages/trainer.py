"""The story: stream -> rollout batch -> update -> new weights -> log -> save, until the first limit is reached."""

import asyncio
import dataclasses
import functools
import math
import shutil
import time
from contextlib import suppress
from pathlib import Path
from shlex import quote
from textwrap import fill

from mtgrpo.config.experiment import Experiment
from mtgrpo.errors import RunError, program
from mtgrpo.evaluation.findings import OTHER_BEFORE, TRAINED, what_was_learned
from mtgrpo.journal import Journal
from mtgrpo.policy.step import Metrics
from mtgrpo.policy.trainer import Stage
from mtgrpo.profile import Profiler
from mtgrpo.record.curve import Curve
from mtgrpo.record.reading import BEFORE
from mtgrpo.record.tokens import TokenRecorder
from mtgrpo.record.writing import page_of, write_summary, write_trajectories
from mtgrpo.stages.budget import Budget, no_better
from mtgrpo.stages.evaluate import AllFailedError, evaluate_during, evaluate_fully
from mtgrpo.stages.metrics import describe_conversations, describe_failures, describe_step
from mtgrpo.stages.restarts import restarting
from mtgrpo.stages.resume import differences, final_results, forget_end, other_measures, settings_of
from mtgrpo.stages.run import Run, open_run
from mtgrpo.stages.saving import Saver, saving
from mtgrpo.stages.sft import warm_start
from mtgrpo.stages.threads import Neighbours
from mtgrpo.stages.trends import WITHOUT_VARIANCE, Trends, foreseen, in_vain
from mtgrpo.stages.update import make_stream, untrained, update
from mtgrpo.types import LEARNING
from mtgrpo.weights.saved import newest_of


async def run_training(experiment: Experiment, folder: Path) -> None:
    """Warm start, evaluate, train, evaluate; everything a run leaves lies in `folder`."""
    curve = Curve()
    summary = await restarting(experiment, folder, lambda again: train(again, folder, curve))
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    drawn = curve.draw(folder, width)
    if "console" in experiment.log:
        place = folder.relative_to(Path.cwd()) if Path.cwd() in folder.parents else folder
        learned = what_was_learned(summary, experiment.eval.samples, experiment.optimizer.lr).splitlines()
        picture, lines = f"the curve is in {place / 'curve.png'}", (fill(line, width) for line in learned)
        print("", drawn, picture, "", *lines, "", next_commands(place, experiment), sep="\n")


def next_commands(folder: Path, experiment: Experiment) -> str:
    """What to try with a run that has ended."""
    said = [f"show {quote(str(folder))}   # its conversations", f"report {quote(str(folder))}   # all on a page"]
    if newest := newest_of(folder):
        checkpoint = quote(f"checkpoint={newest}")
        serves = f"serve {checkpoint}   # an endpoint for your agent, as in training"
        said.append(serves if experiment.agent.active else f"play {checkpoint}   # talk to it")
    return "\n  ".join(["try next:", *(f"{program()} {words}" for words in said)])


async def train(experiment: Experiment, folder: Path, curve: Curve) -> Metrics:
    """The whole run; fills `curve` and returns what `summary.json` holds."""
    experiment.check_training()
    async with open_run(experiment, folder) as run:
        with saving(run, curve) as saver:
            summary = saver.summary
            other = bool(run.resumed and other_measures(run.resumed, settings_of(folder)))
            summary |= {OTHER_BEFORE: 1.0} if other and "eval/success/before" in summary else {}
            run.sinks.tell(list(run.experiment.notes))
            await warm_start(run, saver)
            if "eval/success/before" not in summary:
                summary |= {f"{name}/before": value for name, value in (await evaluate_fully(run, BEFORE)).items()}
                curve.success[0] = summary["eval/success/before"]
                if experiment.algorithm.needs_variance and (note := foreseen(summary, experiment)):
                    run.sinks.note(note)
            steps, seconds = await reinforce(run, saver, curve)
            summary |= {"train/steps": float(steps), "time/rl_s": seconds, "eval/tasks": float(len(run.held_out))}
            try:
                after = final_results(folder, steps) if run.resumed and not other else {}
                summary |= after or {f"{name}/after": value for name, value in (await evaluate_fully(run)).items()}
                curve.success[steps] = summary["eval/success/after"]
            finally:  # also when the evaluation fails
                summary["time/total_s"] = saver.seconds
                write_summary(folder, summary)
        if experiment.algorithm.needs_variance and (note := in_vain(summary)):
            run.sinks.note(note)
    return summary


async def reinforce(run: Run, saver: Saver, curve: Curve) -> tuple[int, float]:
    """Roll out, update, repeat, until the first limit; returns steps and seconds, evaluation and saving not counted."""
    run.trainer.begin(Stage.reinforcement)
    training = _Training(run, saver, curve)
    run.sinks.stage(LEARNING, run.experiment.trainer.steps)
    run.sinks.tell(run.trainer.notes)
    try:
        await training.begin()
        while not training.reached:
            await training.step()
        await saver.save()
    except BaseException:
        with suppress(OSError):  # a full disk does not hide what went wrong
            if training.stream.finished:
                write_trajectories(run.folder, "untrained", training.stream.finished)
        raise
    finally:
        await training.close()
    run.sinks.note(f"stopped after step {training.budget.steps}: {training.reached}")
    if summary := training.profiler.summary():
        run.sinks.note(summary)
    return training.budget.steps, training.budget.seconds


class _Training:
    """Reinforcement learning under way."""

    def __init__(self, run: Run, saver: Saver, curve: Curve) -> None:
        self._run, self._saver, self._curve = run, saver, curve
        experiment = run.experiment
        recorded = not experiment.agent.active  # whose conversations only the agent can take up
        self._journal = Journal(run.folder / "journal" if recorded else None, groups=not experiment.resumes_exactly)
        self._recorder = TokenRecorder(experiment.record.tokens, run.folder, run.sinks.note)
        self.stream = make_stream(run, self._journal)
        self.profiler = Profiler(experiment.profile)
        run.engine.take_seconds()  # those before
        self.budget = Budget(experiment.trainer, **saver.state.get("budget", {}))
        self._trends = Trends(saver.state.get("entropy", math.nan))
        self._neighbours = Neighbours(follows=not experiment.deterministic)
        self._evaluation: asyncio.Task[Metrics] | None = None  # the one that is under way

    @property
    def reached(self) -> str:
        """The limit at which it ends, "" while there is none."""
        stop = no_better(self._curve.success, self._run.experiment.eval.stop)
        return self.budget.reached(self.stream.epoch) or stop

    async def begin(self) -> None:
        """Save the policy that it begins with, or go on from where the run was saved."""
        run, state = self._run, self._saver.state
        if run.resumed is None or "stream" not in state:
            self._journal.clear()
            self._mark(None)
            if self._saver.due(0):
                await self._saver.save()
            return
        run.trainer.load(run.resumed.path, self.budget.steps)
        self.stream.load_state_dict(state["stream"])
        same = not differences(state.get("settings", {}), settings_of(run.folder))
        if same and not run.experiment.resumes_exactly:
            self.stream.go_on(self.budget.steps)
        else:
            self._journal.clear()
        run.sinks.tell(self._journal.notes)
        await run.engine.load_weights(run.trainer.weights())
        if not run.resumed.path.is_relative_to(run.folder):
            self._mark(state["row"])
            await self._saver.save()
        if state["row"] is not None:
            await self._conclude(state["row"])

    async def step(self) -> None:
        """One rollout batch, one update, and where it is due an evaluation and a checkpoint."""
        run, began, step = self._run, time.perf_counter(), self.budget.steps + 1
        self._neighbours.begin_step()
        forget_end(run.folder)
        batch = await self.stream.batch(version=self.budget.steps)
        left_out = untrained(batch, run.experiment)
        evidence = write_trajectories(run.folder, f"step_{step:06d}", batch.groups, left_out, run.engine.pushes)
        keep = functools.partial(self._recorder.write, step, batch.groups)
        try:
            metrics, train_s, interrupted = await update(run, self.profiler, batch.trained, step, keep)
        except RunError as error:
            raise RunError(f"{error}; what it was trained on is in {evidence}: {page_of(evidence)}") from error
        for notes in (run.engine.notes, run.trainer.notes, run.tasks.notes, self._journal.notes):
            run.sinks.tell(notes)
        seconds = time.perf_counter() - began
        metrics |= describe_step(batch, run.experiment, step - 1, seconds - train_s, train_s)
        metrics |= {f"engine/{name}": value for name, value in run.engine.metrics.items()}
        sync_s, waited_s = run.engine.take_seconds()
        if waited_s:
            metrics["perf/lockstep_s"] = waited_s
        if run.experiment.cluster.restarts:
            metrics["perf/restarts"] = float(run.experiment.cluster.restarted)
        conversations = describe_conversations(batch.groups, run.experiment.profile)
        metrics |= self.profiler.step(conversations, run.trainer.take_phases(), train_s, sync_s)
        flat = float(metrics["reward/groups_with_variance"] == 0)
        idle = not metrics.get("policy/updates") or (bool(flat) and run.experiment.algorithm.needs_variance)
        self.budget.count(batch.groups, seconds, idle)
        summary, success = self._saver.summary, metrics["reward/success"]
        summary[WITHOUT_VARIANCE] = summary.get(WITHOUT_VARIANCE, 0.0) + flat
        if not math.isnan(success):
            summary[TRAINED] = 0.8 * summary.get(TRAINED, success) + 0.2 * success
        warnings = [f"{warning}; see {page_of(evidence)}" for warning in self._trends.warnings(metrics)]
        notes = [*describe_failures(batch.groups, evidence), *warnings, *self._neighbours.end_step()]
        self._mark(metrics)
        run.sinks.tell([f"step {step}: {note}" for note in notes])
        await self._conclude(metrics, interrupted)

    async def close(self) -> None:
        """End what still runs; after an evaluation that has not ended beside training there is another one."""
        if self._evaluation is not None:
            self._evaluation.cancel()
            await asyncio.gather(self._evaluation, return_exceptions=True)
        await self.stream.close()

    async def _conclude(self, metrics: Metrics, interrupted: bool = False) -> None:
        """Evaluate the policy after an update where that is due, log what the step was like, and save it."""
        run, step, begun = self._run, self.budget.steps, False
        try:
            if interrupted:
                raise asyncio.CancelledError
            metrics |= await self._end_evaluation()  # of one that has ended meanwhile, where rollouts run ahead
            begun = self._begin_evaluation()
            metrics |= await self._end_evaluation()
        except AllFailedError as error:  # an outage, which may be over at the next step
            run.sinks.note(str(error))
        finally:  # also when Ctrl-C ends the evaluation
            run.sinks.log(metrics, step)
            self._curve.reward.append(metrics["reward/mean"])
        self._mark(None)
        best = begun and run.experiment.checkpoint.keep_best > 0
        if (self._saver.due(step) or best) and not self.reached:
            await self._saver.save()
        oldest = self._saver.step if run.experiment.checkpoint.every_steps else step  # to go on from
        self._journal.prune(oldest - run.experiment.rollout.max_staleness)

    def _begin_evaluation(self) -> bool:
        """Whether an evaluation is due after this step; it has begun then."""
        every, step = self._run.experiment.eval.every_steps, self.budget.steps
        due = bool(every) and step % every == 0 and not self.reached and self._evaluation is None
        if due:
            self._evaluation, self._saver.measured = asyncio.create_task(evaluate_during(self._run)), step
        return due

    async def _end_evaluation(self) -> Metrics:
        """What the evaluation under way has measured; {} while rollouts run ahead and it has not ended."""
        ahead = self._run.experiment.rollout.max_staleness
        if self._evaluation is None or (ahead and not self._evaluation.done()):
            return {}
        evaluation, self._evaluation = self._evaluation, None
        step, self._saver.measured = self._saver.measured, 0
        metrics = await evaluation
        if (version := metrics.pop("eval/version", None)) is not None:
            metrics["eval/staleness"] = self.budget.steps - version
        self._curve.success[step] = metrics["eval/success"]
        return metrics

    def _mark(self, row: Metrics | None) -> None:
        """The run can go on from here; `row` are metrics of the last step that are still to be logged."""
        budget = {name: value for name, value in dataclasses.asdict(self.budget).items() if name != "settings"}
        state = {"budget": budget, "stream": self.stream.state_dict(), "row": row and dict(row)}
        self._saver.mark(self.budget.steps, entropy=self._trends.entropy, **state)
