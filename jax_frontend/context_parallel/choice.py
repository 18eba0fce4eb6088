"""Which strategy a context-parallel call takes, and why."""

from __future__ import annotations

from attn_core.context_parallel.cost.choose import Choice, check_asked, choose
from attn_core.context_parallel.cost.machine import Constants
from jax_frontend.context_parallel.mesh import Place
from jax_frontend.context_parallel.question import Question


def chosen(question: Question, place: Place, strategy: str | None, head_groups: int | None) -> tuple[Question, Choice]:
    """The question with the strategy that the caller names, or the one that is fastest in training, and why.

    Raises:
        SpecError: for a strategy nobody knows, or that the mesh has no axis for.
        NoStrategyError: when none can, or not the one asked for, with every reason.
    """
    check_asked(strategy, head_groups)
    spec, constants = question.spec(True)[0], Constants.of(question.device)
    choice = choose(spec, question.documents, question.layout, place.sizes, constants, None, strategy)
    groups = 1 if head_groups is None else int(head_groups)
    made = question._replace(strategy=choice.strategy or "", axes=place.axes(choice.strategy), head_groups=groups)
    return made, choice
