"""The conversations that environments send along are in the table of completions, beside the rows
they belong to."""

import json
from pathlib import Path

import pandas
import pytest

from tests.rollout_factory import Group, make_group, make_trainer


def tables(folder: Path) -> list[pandas.DataFrame]:
    return [
        pandas.read_parquet(path)
        for path in sorted((folder / "run" / "completions").glob("*.parquet"))
    ]


def conversation(word: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}]


def with_messages(group: Group, name: str) -> Group:
    return group | {"messages": [conversation(f"{name}{i}") for i in range(len(group["tokens"]))]}


def test_messages_are_beside_their_rollout_in_table(tiny_model, tmp_path):
    groups = [with_messages(make_group(tiny_model, 4, 1), "a"), make_group(tiny_model, 4, 2)]
    make_trainer(tiny_model, tmp_path, groups, log_completions=True).train()
    table = tables(tmp_path)[0]
    assert [json.loads(text) for text in table["messages"][:4]] == [
        conversation(f"a{i}") for i in range(4)
    ]
    assert table["messages"][4:].isna().all()
    assert table["atropos_score"][:4].tolist() == pytest.approx(groups[0]["scores"])


def test_batch_without_messages_shows_no_older_ones(tiny_model, tmp_path):
    named = [with_messages(make_group(tiny_model, 8, 1), "a")]
    batches = [[make_group(tiny_model, 8, 2)], named, [make_group(tiny_model, 8, 3)]]
    make_trainer(tiny_model, tmp_path, *batches, max_steps=3, log_completions=True).train()
    first, second, third = tables(tmp_path)
    assert "messages" not in first
    assert second["messages"].notna().all()
    assert third["messages"].isna().all()


def test_table_without_messages_has_no_column(tiny_model, tmp_path):
    make_trainer(tiny_model, tmp_path, [make_group(tiny_model, 8, 1)], log_completions=True).train()
    assert "messages" not in tables(tmp_path)[0]
