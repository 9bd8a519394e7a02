"""Another choice next to the plan's choice: the answer to "why not this layout".

The other choice is the best under the asked pins, as in a what-if. Without the plan's profile it
is a candidate that the plan keeps.
"""

from dataclasses import replace

from moetune.app.subjects import Subject
from moetune.app.subjects.values import WhyNot, is_same_step
from moetune.report.why_not import ComparedChoice, WhyNotAnswer, drift_words, kept_words


def answer_why_not(subject: Subject, question: WhyNot) -> WhyNotAnswer:
    """Return another choice next to the plan's choice.

    Raises:
        InputError: a value is not possible, or the plan has no such choice.
        ProfileError: the profile lacks an operation; or is missing, and the plan lacks the choice.
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
    instead = subject.instead(asked)
    return replace(
        answer, other=instead.choice, refused=instead.refused,
        probability_faster=instead.probability_faster,
        kept_because=_lost_because(subject, instead.choice) if instead.choice else "",
        rule="" if instead.refused else subject.rule, notes=(*answer.notes, *instead.notes),
    )  # fmt: skip


def _from_plan(subject: Subject, answer: WhyNotAnswer) -> WhyNotAnswer:
    """Return the fastest candidate with the asked values among those that the plan keeps."""
    if answer.asked.items() <= answer.chosen.decision.items():
        return replace(answer, other=answer.chosen)
    lost = [
        row for row in subject.alternatives if answer.asked.items() <= row.choice.decision.items()
    ]
    if not lost:
        _ = subject.machine  # which says that it is missing
    fastest = min(lost, key=lambda row: row.choice.step_seconds)
    notes = (kept_words(subject.plan.inputs.profile),)
    return replace(answer, other=fastest.choice, kept_because=fastest.lost_because, notes=notes)


def _lost_because(subject: Subject, choice: ComparedChoice) -> str:
    """Return the plan's reason why a choice lost; "" if the plan does not keep the choice."""
    for row in subject.alternatives:
        is_same = row.choice.decision.items() <= choice.decision.items()
        if is_same and is_same_step(row.choice.step_seconds, choice.step_seconds):
            return row.lost_because
    return ""


def _drift_notes(subject: Subject) -> tuple[str, ...]:
    """Return a note if this version predicts another step for the plan's choice."""
    now = subject.seconds()
    if is_same_step(now, subject.choice.step_seconds):
        return ()
    return (drift_words(now),)
