"""The recipe of arithmetic: its problems, its reward, and that training on it helps with problems never seen."""

import asyncio
from itertools import islice

import pytest

from recipes.arithmetic.environment import TEST_SIZE, ArithmeticConfig, ArithmeticEnv, problems, score, value, worked

SIZES = [{}, {"terms": 3}, {"terms": 6, "digits": 2}]


@pytest.mark.parametrize("size", SIZES)
def test_no_problem_of_the_test_split_is_asked_in_training(size):
    test = list(islice(problems("test", **size), TEST_SIZE))
    assert len(set(test)) == TEST_SIZE
    for seed in (0, 1, 42):
        assert set(test).isdisjoint(islice(problems("train", **size, seed=seed), 20_000))


def test_the_test_split_is_always_the_same_and_a_seed_draws_its_own_training():
    def first(split: str, seed: int) -> list[str]:
        return list(islice(problems(split, seed=seed), 2 * TEST_SIZE))

    assert first("test", 1) == first("test", 2) == first("test", 1)[:TEST_SIZE] * 2
    assert first("train", 1) == first("train", 1) != first("train", 2)


@pytest.mark.parametrize("size", SIZES)
def test_the_steps_of_a_problem_are_equal_to_it(size):
    for problem in islice(problems("train", **size), 500):
        steps = worked(problem).split("=")
        assert len(steps) == size.get("terms", 4) and {eval(step) for step in steps} == {eval(problem)}
        assert score(f"{problem}=", worked(problem)) == score(f"{problem}=", value(problem)) == 1.0


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("42", 1.0),
        ("9+21+8+4=30+8+4=38+4=42", 1.0),
        ("1=2=42", 1.0),  # only the last number counts
        ("43", 0.0),
        ("9+21+8+4=30+8+4=38+4=43", 0.0),
        ("42=43", 0.0),
        ("42=", 0.0),
        ("38+4", 0.0),
        ("042", 0.0),
        ("42+", 0.0),
        ("+42", 0.0),
        ("420", 0.0),
        (" 42", 0.0),
        ("42\n", 0.0),
        ("four", 0.0),
        ("", 0.0),
    ],
)
def test_the_last_number_is_the_answer(completion, reward):
    assert score("9+3*7+8+4=", completion) == reward


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_environment_asks_the_problems_of_its_split(split):
    environment = object.__new__(ArithmeticEnv)  # without a server
    environment.config = ArithmeticConfig(split=split, terms=3, digits=2, seed=7)

    async def asked() -> list[str]:
        await environment.setup()
        return [(await environment.get_next_item())["prompt"] for _ in range(20)]

    assert asyncio.run(asked()) == [f"{one}=" for one in islice(problems(split, terms=3, digits=2, seed=7), 20)]
