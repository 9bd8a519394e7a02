"""Another choice of a plan beside the plan's own: the answer to "why not this one".

The other choice is the best with what was asked pinned, as for a what-if. Without the plan's
profile it is one of the candidates that the plan keeps.
"""

from dataclasses import replace

from moetune.app.compared import ComparedChoice, WhyNot, WhyNotAnswer, is_same_step
from moetune.app.subjects import Subject
from moetune.domain.units import format_seconds


def answer_why_not(subject: Subject, question: WhyNot) -> WhyNotAnswer:
    """Return another choice beside a plan's own.

    Without the plan's profile it is the fastest such candidate that the plan keeps.

    Raises:
        InputError: a value is none that it could have, or the plan has no such choice.
        ProfileError: neither plan nor profile has it, or the profile lacks an operation.
    """
    asked, choice = subject.asked(question), subject.choice
    answer = WhyNotAnswer(
        plan=subject.plan.id, asked=asked.texts, source="plan", chosen=choice,
        limit_bytes=subject.memory_limit_bytes,
    )  # fmt: skip
    if subject.profile is None:
        return _from_plan(subject, answer)
    answer = replace(answer, source="solved", notes=_drift_notes(subject))
    if asked.texts.items() <= choice.decision.items():
        return replace(answer, other=choice)
    answer = subject.instead(asked, answer)
    if answer.refused is None:
        answer = replace(answer, rule=subject.rule)
    if answer.other is None:
        return answer
    return replace(answer, kept_because=_lost_because(subject, answer.other))


def _from_plan(subject: Subject, answer: WhyNotAnswer) -> WhyNotAnswer:
    """Return the fastest candidate with what is asked that the plan keeps."""
    if answer.asked.items() <= answer.chosen.decision.items():
        return replace(answer, other=answer.chosen)
    lost = [
        row for row in subject.alternatives if answer.asked.items() <= row.choice.decision.items()
    ]
    if not lost:
        _ = subject.machine  # which says that it is missing
    fastest = min(lost, key=lambda row: row.choice.step_seconds)
    note = (
        f"Profile {subject.plan.inputs.profile!r} is not here, or has changed: this is the fastest "
        "such choice that the plan has kept, and others were not compared"
    )
    return replace(answer, other=fastest.choice, kept_because=fastest.lost_because, notes=(note,))


def _lost_because(subject: Subject, choice: ComparedChoice) -> str:
    """Return why the plan says that a choice lost; "" where it does not keep it."""
    for row in subject.alternatives:
        is_same = row.choice.decision.items() <= choice.decision.items()
        if is_same and is_same_step(row.choice.step_seconds, choice.step_seconds):
            return row.lost_because
    return ""


def _drift_notes(subject: Subject) -> tuple[str, ...]:
    """Return a note where this version predicts another step for the plan's own choice."""
    now = subject.seconds()
    if is_same_step(now, subject.choice.step_seconds):
        return ()
    note = f"This version of moetune predicts {format_seconds(now)} for the plan's own choice: "
    return (f"{note}make the plan again to compare like with like",)
