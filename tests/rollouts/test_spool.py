"""The files in which rollouts are kept: what is in them, what happens to bad ones, and how many
there are."""

import json
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest

from tests.rollouts.conftest import DATA, admitted, assert_same_rows, make_group
from trl_atropos.errors import RolloutError
from trl_atropos.rollouts.rollout import Rollout, from_table, to_table
from trl_atropos.rollouts.spool import HEADER, Delivery, FileHeader, Spool

DELIVERY = Delivery("run-1", 1, 0, 4, 1, 0)


def make_row(length: int = 3, **fields) -> Rollout:
    usual = {
        "prompt_ids": np.arange(1, 3, dtype=np.int32),
        "completion_ids": np.arange(length, dtype=np.int32),
        "mask": np.arange(length) != 1,
        "logprobs": np.where(np.arange(length) != 1, -0.5, np.nan).astype(np.float32),
        "score": 0.1,
        "group_mean": 1 / 3,
        "group_std": 0.7,
        "token_advantages": None,
        "zero_advantage": False,
        "env_id": None,
    }
    return Rollout(**(usual | fields))


def full_row() -> Rollout:
    return make_row(
        5,
        token_advantages=np.linspace(-1, 1, 5, dtype=np.float32),
        zero_advantage=True,
        env_id=3,
        policy_version=7,
        newest_version=9,
        raw_advantage=True,
        group=4,
        sft=True,
        distill_ids=np.arange(10, dtype=np.int32).reshape(5, 2),
        distill_logprobs=np.full((5, 2), np.nan, dtype=np.float32),
        messages='[{"role": "user", "content": "é"}]',
        rewards={"format": 0.1, "pass@1": -(2.0**40)},
    )


def append(spool: Spool, start: int, *rows: Rollout, size: int = 4, **fields) -> None:
    dropped = {"rejected": size - len(rows)} if size > len(rows) else {}
    spool.append(FileHeader(start, size, DELIVERY, dropped, **fields), rows)


def path_of(spool: Spool, start: int) -> Path:
    return spool.folder / f"rows-{start:012d}.arrow"


def test_rows_come_back_with_every_field(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    rows = [
        make_row(),
        full_row(),
        make_row(1),
        make_row(2, distill_ids=np.zeros((2, 3), np.int32)),
    ]
    append(spool, 0, *rows)
    again = Spool(tmp_path / "rollouts", 1e9)
    assert_same_rows(again.read(again.headers[0]), rows, but=("arrived",))


def test_row_index_counts_dropped_and_lost_rows(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(spool, 8, make_row(), make_row())
    assert [row.index for row in spool.read(spool.headers[0])] == [10, 11]


def test_rejected_batch_is_file_without_rows(tmp_path):
    append(Spool(tmp_path / "rollouts", 1e9), 0, policy_branches=[["a", 0]], version=5)
    spool = Spool(tmp_path / "rollouts", 1e9)
    assert spool.headers == [FileHeader(0, 4, DELIVERY, {"rejected": 4}, 0, [["a", 0]], 5)]
    assert spool.read(spool.headers[0]) == []


def test_old_files_are_read_and_written_alike(tmp_path):
    """`data/spool` was written when the classes of the header and its fields had other names."""
    shutil.copytree(DATA / "spool", tmp_path / "rollouts")
    spool = Spool(tmp_path / "rollouts", 1e9)
    branches = [["a", 0], ["b", 3]]
    deliveries = [Delivery("run-1", 4, 0, 4, 2, 0), Delivery("run-1", 4, 0, 4, 2, 1)]
    assert spool.headers == [
        FileHeader(0, 4, deliveries[0], {}, 4, branches, 5),
        FileHeader(4, 4, deliveries[1], {"rejected": 2}, 0, branches, 5),
    ]
    assert spool.last_delivery() == deliveries[0]
    assert spool.registrations == {"run-1": 2}
    rows = spool.read(spool.headers[1])
    assert [(row.index, row.score, row.rewards) for row in rows] == [(6, 1, None), (7, 2, None)]
    for header in spool.headers:
        with pa.memory_map(str(path_of(spool, header.start))) as file:
            written = json.loads(pa.ipc.open_file(file).schema.metadata[HEADER])
        assert list((written | {"crc32": "00000000"}).items()) == list(
            json.loads(header.to_json(spool.name)).items()
        )


def test_columns_of_later_versions_are_passed_over():
    """So that a run may go back to this version, as to those that knew no parts of rewards."""
    rows = [full_row(), make_row()]
    table = to_table(rows)
    later = table.append_column("new", pa.array([[1], None]))
    assert_same_rows(from_table(later), rows, but=("arrived",))
    later_columns = table.column_names[-2:]
    assert later_columns == ["rewards", "tree"]  # earlier versions read the columns before these
    without = from_table(table.drop_columns("rewards"))
    assert_same_rows(without, rows, but=("arrived", "rewards"))
    assert [row.rewards for row in without] == [None, None]


def test_datasets_reads_files_with_typed_columns(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(spool, 0, full_row(), make_row())
    append(spool, 4)
    table = datasets.load_dataset(
        "arrow",
        data_files=str(spool.folder / "*.arrow"),
        split="train",
        cache_dir=str(tmp_path / "cache"),
    )
    assert table["index"] == [2, 3]
    assert table[0]["distill_ids"] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert (table[1]["env_id"], table[1]["mask"]) == (None, [True, False, True])
    assert table[0]["rewards"][0] == {"name": "format", "value": 0.1}
    assert table[1]["rewards"] is None
    assert str(table.features["logprobs"].feature.dtype) == "float32"
    assert table[0]["pulled_at"].tzname() == "UTC"


def test_append_syncs_batch_and_then_its_name(tmp_path, monkeypatch):
    spool = Spool(tmp_path / "rollouts", 1e9)
    synced = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((os.path.basename(name), path_of(spool, 0).exists()))

    monkeypatch.setattr(os, "fsync", noted)
    append(spool, 0, *[make_row()] * 4)
    assert synced == [(".rows-000000000000.arrow.tmp", False), ("rollouts", True)]


@pytest.mark.parametrize("keep", [0, 0.3, 0.9])
def test_torn_file_is_skipped_with_warning(tmp_path, caplog, keep):
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(spool, 0, *[make_row()] * 4)
    append(spool, 4, *[make_row()] * 4)
    torn = path_of(spool, 0)
    os.truncate(torn, int(keep * torn.stat().st_size))
    again = Spool(tmp_path / "rollouts", 1e9)
    assert [header.start for header in again.headers] == [4]
    assert f"{torn} is not a whole file of rollouts" in caplog.text


@pytest.mark.parametrize("of_the_file", [0.05, 0.5, 0.97])
def test_corrupted_file_is_told_from_seal_like_text(tmp_path, of_the_file):
    spool = Spool(tmp_path / "rollouts", 1e9)
    like_a_seal = '"crc32": "00000000"'  # in the text of a rollout
    append(spool, 0, *[make_row(messages=like_a_seal)] * 4)
    assert [row.messages for row in spool.read(spool.headers[0])] == [like_a_seal] * 4
    content = bytearray(path_of(spool, 0).read_bytes())
    content[int(of_the_file * len(content))] ^= 0x10
    path_of(spool, 0).write_bytes(content)
    with pytest.raises(RolloutError, match="is not a whole file of rollouts"):
        spool.read(spool.headers[0])


def test_foreign_files_are_skipped_with_warning(tmp_path, caplog):
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(Spool(tmp_path / "other", 1e9), 0, *[make_row()] * 4)
    shutil.copy(tmp_path / "other" / "rows-000000000000.arrow", spool.folder)
    with pa.OSFile(str(path_of(spool, 4)), "wb") as file, pa.ipc.new_file(file, pa.schema([])):
        pass
    (spool.folder / "notes.txt").write_text("mine")
    assert Spool(tmp_path / "rollouts", 1e9).headers == []
    assert "it is of another run" in caplog.text
    assert f"{path_of(spool, 4)} is not a whole file" in caplog.text


def test_foreign_spool_meta_is_refused_with_fix(tmp_path):
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "spool.meta").write_text("[]")
    with pytest.raises(
        RolloutError, match=r"spool\.meta is not what this program wrote .* Move .*rollouts away"
    ):
        Spool(tmp_path / "rollouts", 1e9)


def test_draft_left_by_crash_is_removed(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    draft = spool.folder / ".rows-000000000000.arrow.tmp"
    draft.write_bytes(b"half")
    Spool(tmp_path / "rollouts", 1e9)
    assert not draft.exists()


def test_oldest_unneeded_files_go_above_limit(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    for start in (0, 4, 8):
        append(spool, start, *[make_row()] * 4)
    small = Spool(tmp_path / "rollouts", path_of(spool, 0).stat().st_size)
    assert not small.trim(3)
    assert small.trim(6)
    assert [path.name for path in sorted(spool.folder.glob("*.arrow"))] == [
        "rows-000000000004.arrow",
        "rows-000000000008.arrow",
    ]
    assert small.trim(100)
    assert [header.start for header in small.headers] == [8]
    assert small.excess() <= 0


def test_unwritable_file_leaves_others_and_tells_fix(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(spool, 0, *[make_row()] * 4)
    (spool.folder / ".rows-000000000004.arrow.tmp").mkdir()  # not even root can open that to write
    with pytest.raises(
        RolloutError, match=rf"cannot be kept in {spool.folder}: Is a directory\..*Make room"
    ):
        append(spool, 4, *[make_row()] * 4)
    (spool.folder / ".rows-000000000004.arrow.tmp").rmdir()
    assert [header.start for header in Spool(tmp_path / "rollouts", 1e9).headers] == [0]


def branching_row() -> Rollout:
    branch = {"of": 0, "at": 2, "tokens": [9, 3], "masks": [-100, 3]}
    row, _ = admitted(make_group(0, 1, overrides=[{"branches": [branch]}, None]))
    return row


def test_file_with_branches_is_kept_from_earlier_versions(tmp_path):
    """They know format 1, and they find a file's checksum as `crc32`. Without one they take the
    file for damaged, also to replay it, where they do not look at the format."""
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(spool, 0, make_row(), make_row())
    append(spool, 4, branching_row(), make_row())
    written = []
    for header in spool.headers:
        with pa.memory_map(str(path_of(spool, header.start))) as file:
            written.append(json.loads(pa.ipc.open_file(file).schema.metadata[HEADER]))
    assert [record["format"] for record in written] == [1, 2]
    assert ["crc32" in record for record in written] == [True, False]


def test_file_with_branches_is_read_by_next_life_of_run(tmp_path):
    spool = Spool(tmp_path / "rollouts", 1e9)
    rows = [branching_row(), make_row()]
    append(spool, 4, *rows)
    again = Spool(tmp_path / "rollouts", 1e9)
    (header,) = again.headers
    assert_same_rows(again.read(header), rows, but=("arrived",))
    path = path_of(again, header.start)
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(RolloutError, match="rollouts"):
        again.read(header)


def test_file_of_newer_format_is_passed_over_with_its_number(tmp_path, caplog):
    spool = Spool(tmp_path / "rollouts", 1e9)
    append(spool, 0, make_row(), make_row())
    path = path_of(spool, 0)
    path.write_bytes(path.read_bytes().replace(b'"format": 1', b'"format": 9'))
    assert Spool(tmp_path / "rollouts", 1e9).headers == []
    assert "another version of trl_atropos wrote it, in format 9" in caplog.text
