"""mtgrpo: GRPO training of language-model agents over multi-turn conversations that use tools.

    task -> rollout (turns, tools) -> reward -> advantage -> batch -> loss -> optimiser -> weights -> engine

The parts, in the order of the data:

    types         the nouns: Task, Message, Turn, Trajectory, Group, Completion, Sampling
    extension     how a name on the command line becomes a class
    tools         what a model may call; one file = one tool
    environments  what the agent meets: start(task), step(message); one file = one environment
    condensers    what the model still sees of a long conversation; one file = one way
    tasks         where work comes from; one file = one data set
    rewards       what a trajectory is worth; one file = one reward
    algorithms    baseline and per-token loss; one file = one algorithm
    credits       which turn deserves what: rewards -> advantages; one file = one way
    model         the language model: loading, log-probabilities
    batch         turns -> token forest -> micro-batches
    rollout       messages <-> tokens, the turn loop, groups of siblings
    policy        the optimiser step
    engines       who samples
    log           where metrics go; one file = one sink
    checkpoint    save, verify, find
    profile       where the time goes
    experiment    the whole configuration as one dataclass
    run           what is open during a run
    rollouts      the same for people with an engine of their own
    trainer       the story: rollout -> batch -> step -> log -> save
    evaluate      the same conversations without an update
    sft           the supervised warm start
    options       what can be chosen and what can be set
    compose       the words of the command line -> an experiment
    helptext      every option with what its source says of it
    cli           the command `mtgrpo`

A part imports only from parts below it, and parts on one line never meet:

    cli
    helptext
    compose
    options
    trainer
    sft
    evaluate
    rollouts
    run
    experiment
    rollout | policy | engines | log | checkpoint
    credits | profile
    environments | condensers | rewards | tasks | algorithms | batch | model
    tools
    extension
    types

Importing this package imports nothing heavy; what it offers to Python is imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtgrpo.compose import preset as preset
    from mtgrpo.rollouts import rollout_with_advantages as rollout_with_advantages

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "preset":
        from mtgrpo.compose import preset  # noqa: PLC0415

        return preset
    if name == "rollout_with_advantages":
        from mtgrpo.rollouts import rollout_with_advantages  # noqa: PLC0415

        return rollout_with_advantages
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
