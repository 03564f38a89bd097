"""mtgrpo: GRPO training of language-model agents over multi-turn conversations that use tools.

    task -> rollout (turns, tools) -> reward -> advantage -> batch -> loss -> optimiser -> weights -> engine

The parts, in the order of the data:

    types         the nouns: Task, Message, Turn, Trajectory, Group, Completion, Sampling
    errors        what ends a run, or is said before one
    extension     how a name on the command line becomes a class
    statistics    what an evaluation may claim: pass@k, intervals, comparison of two policies
    resources     what a machine has left of memory and disk
    strict_json   JSON that every reader accepts
    together      several things at once, none of which is left running; somebody's code, which must not end the program
    part          settings, and what is open while a run lasts: what all parts have in common
    workers       processes for what takes the processor for long
    tools         what a model may call; one file = one tool, or one family of tools
    environments  what the agent meets: start(task), step(message), stop(); one file = one environment
    condensers    what the model still sees of a long conversation; one file = one way
    tasks         where work comes from; one file = one data set
    rewards       what a trajectory is worth; one file = one reward
    chat          messages <-> tokens: chat templates and tool-call formats
    rollout       the turn loop, groups of siblings, the stream of groups
    algorithms    baseline and per-token loss; one file = one algorithm
    advantages    which turn and token gets what; one file = one way
    batch         turns -> token forest -> micro-batches
    model         the language model: loading, forest attention, scores of sampled tokens
    policy        one rollout batch into new weights
    engines       who samples
    log           where metrics go; one file = one sink
    record        what a run keeps: trajectories, summary, curve
    checkpoint    save, verify, find
    profile       where the time goes
    config        the command line -> one dataclass; the help; the recipes
    memory        what a run needs of its device, before anything is loaded
    stages        warm start, evaluation, training, and what is open meanwhile
    doctor        what this machine has of what training can use
    report        what runs did, on a page
    watch         a run, live in a terminal
    cli           the command `mtgrpo`

A part imports only from parts below it, and parts on one line never meet:

    cli
    doctor | report | watch
    stages
    memory
    config
    rollout | policy | engines | log | record | checkpoint
    advantages | profile | chat
    environments | condensers | rewards | tasks | algorithms | model
    tools | batch
    part | workers
    extension | statistics | strict_json | together | resources
    errors
    types

Importing this package imports nothing heavy; what it offers to Python is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtgrpo.config.compose import preset as preset
    from mtgrpo.stages.api import rollout_with_advantages as rollout_with_advantages

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "preset":
        from mtgrpo.config.compose import preset  # noqa: PLC0415

        return preset
    if name == "rollout_with_advantages":
        from mtgrpo.stages.api import rollout_with_advantages  # noqa: PLC0415

        return rollout_with_advantages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
