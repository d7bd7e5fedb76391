from __future__ import annotations

import itertools

import pytest

from megatron_fr.agents.arithmetic import Question, boxed_integer, questions


def test_questions_are_computed_right() -> None:
    question = Question(37, 48, "-", 159)
    assert question.text == "Compute 37 * 48, then subtract 159 from the result."
    assert question.record() == {
        "id": "37*48-159",
        "prompt": question.text,
        "answer": 1617,
        "intermediate": 1776,
    }
    assert Question(37, 48, "+", 159).answer == 1935
    assert "add 159 to" in Question(37, 48, "+", 159).text


def test_generated_questions_are_distinct_in_range_and_reproducible() -> None:
    some = list(itertools.islice(questions(3), 2000))
    assert some == list(itertools.islice(questions(3), 2000))
    assert some[:50] != list(itertools.islice(questions(4), 50))
    assert len(set(some)) == len(some)
    for question in some:
        assert 1000 <= question.intermediate <= 9999
        assert 1000 <= question.answer <= 9999
    assert {question.operation for question in some} == {"+", "-"}


def test_training_and_held_out_questions_never_overlap() -> None:
    train = set(itertools.islice(questions(0), 5000))
    held_out = set(itertools.islice(questions(1, held_out=True), 1000))
    assert not train & held_out
    assert all(question.held_out for question in held_out)
    assert not any(question.held_out for question in train)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("\\boxed{1717}", 1717),
        ("So \\boxed{3}, no: \\boxed{ -1,234 }.", -1234),
        ("1717", None),
        ("\\boxed{" + "1" * 5000 + "}", None),  # int() raises on more than 4,300 digits
        ("\\boxed{12.5}", None),
        ("\\boxed{}", None),
        ("\\boxed{1717", None),
    ],
)
def test_the_last_boxed_integer_counts(text: str, value: int | None) -> None:
    assert boxed_integer(text) == value
